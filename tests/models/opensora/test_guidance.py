"""The combination of both halves, on a network whose answer is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ertacache.models.opensora.guidance import GuidedVelocity
from ertacache.models.opensora.sizes import Video
from ertacache.models.opensora.text import EncodedText

VIDEO = Video(32, 32, 5, 24.0)
LATENTS = torch.zeros(1, 2, 2, 4, 4)


class Network:
    """Answers with the text, and with a variance that must not be seen."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, hidden_states: Tensor, **call: Any) -> tuple[Tensor]:
        latents = hidden_states
        self.calls.append(call | {"latents": latents})
        text = call["encoder_hidden_states"].mean(dim=(1, 2)).view(-1, 1, 1, 1, 1)
        return (torch.cat([latents + text, latents + 1e6], dim=1),)


def test_text_is_first_and_counts_as_often_as_the_scale_says() -> None:
    network = Network()
    text = EncodedText.of(torch.tensor([3.0, 1.0]).view(2, 1, 1), None)
    v = GuidedVelocity(network, text, VIDEO, 7.0)(LATENTS, torch.tensor(900.0), None)
    assert v.shape == LATENTS.shape
    assert v.unique().item() == 1 + 7 * (3 - 1)
    (call,) = network.calls  # both halves in one call
    assert call["latents"].shape[0] == 2
    assert call["timestep"].tolist() == [900.0, 900.0]


def test_without_guidance_the_network_sees_the_text_only() -> None:
    network = Network()
    text = EncodedText.of(torch.full((1, 1, 1), 3.0), None)
    generated = torch.tensor([[False, True]])
    v = GuidedVelocity(network, text, VIDEO, None)(LATENTS, torch.tensor(900.0), generated)
    assert v.unique().item() == 3
    assert torch.equal(network.calls[0]["frame_mask"], generated)
