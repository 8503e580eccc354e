"""The velocity at one step: the network with and without the text, in one batch, combined.

Knows nothing of schedulers: who asks for a velocity, and what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ertacache.models.opensora.sizes import Video
from ertacache.models.opensora.text import EncodedText

__all__ = ["GuidedVelocity"]


@dataclass(frozen=True, eq=False)
class GuidedVelocity:
    """What does not change from step to step.

    Attributes:
        transformer: the network.
        text: the prompts, followed by the empty texts if there is guidance.
        video: what the network is told of the video.
        scale: guidance scale w of ``v = v_empty + w (v_text - v_empty)``; None without guidance.
    """

    transformer: Any
    text: EncodedText
    video: Video
    scale: float | None

    def __call__(self, latents: Tensor, timestep: Tensor, generated: Tensor | None) -> Tensor:
        """Return the velocity of ``latents``; ``generated`` tells frames with noise from others."""
        copies = 1 if self.scale is None else 2
        output = self.transformer(
            hidden_states=latents.repeat(copies, 1, 1, 1, 1),
            timestep=timestep.expand(copies * len(latents)),
            encoder_hidden_states=self.text.embeds,
            encoder_attention_mask=self.text.mask,
            fps=self.video.fps,
            height=self.video.height,
            width=self.video.width,
            frame_mask=None if generated is None else generated.repeat(copies, 1),
            return_dict=False,
        )[0]
        velocity: Tensor = output[:, : latents.shape[1]]  # the rest is a variance
        if self.scale is None:
            return velocity
        with_text, empty = velocity.chunk(2)
        return empty + self.scale * (with_text - empty)
