"""STDiT3 against the public implementation, and as a diffusers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.models.opensora import OpenSoraTransformer3DModel
from tests.models.opensora.small import GOLDEN, TRANSFORMER, golden, transformer

INPUTS = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "fps")
SIZE = {"height": 48, "width": 75}


@pytest.fixture(scope="module")
def public() -> dict[str, Tensor]:
    return golden("transformer")


def run(network: OpenSoraTransformer3DModel, public: dict[str, Tensor], **changes: Any) -> Tensor:
    with torch.no_grad():
        return network(**({name: public[name] for name in INPUTS} | SIZE | changes)).sample


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Up to rounding: processors differ by 1.2e-5 where the values reach 3."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_recipe_makes_the_weights_that_the_public_code_had(public: dict[str, Tensor]) -> None:
    weight = transformer().state_dict()["spatial_blocks.0.attn.qkv.weight"]
    assert torch.equal(weight[:2, :8], public["weight"])


def test_agrees_with_the_public_implementation(public: dict[str, Tensor]) -> None:
    network = transformer()
    assert_near(run(network, public), public["plain"])
    assert_near(run(network, public, encoder_attention_mask=None), public["whole_text"])


def test_agrees_without_normalised_queries(public: dict[str, Tensor]) -> None:
    assert_near(run(transformer(qk_norm=False), public), public["no_qk_norm"])


def test_agrees_where_frames_are_generated(public: dict[str, Tensor]) -> None:
    """For given frames the public final layer modulates twice; no sampler uses that output."""
    generated = public["frame_mask"]
    ours = run(transformer(), public, frame_mask=generated).transpose(1, 2)
    assert_near(ours[generated], public["masked"].transpose(1, 2)[generated])
    assert not torch.allclose(ours[generated], public["plain"].transpose(1, 2)[generated], atol=0.1)


def test_frame_mask_of_all_frames_is_like_none(public: dict[str, Tensor]) -> None:
    everything = torch.ones_like(public["frame_mask"])
    assert_near(run(transformer(), public, frame_mask=everything), public["plain"])


def test_padding_of_the_text_has_no_effect(public: dict[str, Tensor]) -> None:
    noise = torch.randn_like(public["encoder_hidden_states"])
    text = public["encoder_hidden_states"]
    text = torch.where(public["encoder_attention_mask"][..., None] == 1, text, noise)
    assert_near(run(transformer(), public, encoder_hidden_states=text), public["plain"])


def published_keys() -> dict[str, list[int]]:
    published = json.loads((GOLDEN / "keys.json").read_text())
    return {
        key.replace("*", str(layer)): shape
        for key, shape in published["transformer"].items()
        for layer in range(published["num_layers"] if "*" in key else 1)
    }


def test_full_size_has_the_published_keys_and_shapes() -> None:
    with torch.device("meta"):
        state = OpenSoraTransformer3DModel().state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == published_keys()
    assert len(state) == 973


def test_round_trip(public: dict[str, Tensor], tmp_path: Path) -> None:
    network = transformer()
    network.save_pretrained(tmp_path)
    again = OpenSoraTransformer3DModel.from_pretrained(tmp_path)
    assert again.config["patch_size"] == [1, 2, 2]
    assert torch.equal(run(again, public), run(network, public))


def test_half_precision_outputs_float32(public: dict[str, Tensor]) -> None:
    """The timestep is rounded to the precision of the network, as in the public code."""
    timestep = public["timestep"].bfloat16().float()
    precise = run(transformer(), public, timestep=timestep)
    output = run(transformer().bfloat16(), public)
    assert output.dtype == torch.float32
    assert (output - precise).abs().mean() < 0.03 * precise.abs().mean()


def test_gradients_with_and_without_checkpointing(public: dict[str, Tensor]) -> None:
    gradients = []
    for checkpointing in (False, True):
        network = transformer()
        if checkpointing:
            network.enable_gradient_checkpointing()
        inputs = {name: public[name] for name in INPUTS}
        network.train()(**inputs, **SIZE).sample.square().mean().backward()
        assert network.rope.freqs.grad is None
        gradients.append(network.x_embedder.proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_fresh_temporal_blocks_contribute_nothing() -> None:
    """As published: training starts from an image network."""
    network = OpenSoraTransformer3DModel(**TRANSFORMER).eval()
    x, text = torch.randn(1, 4, 3, 4, 4), torch.randn(1, 9, 24)
    call = {"timestep": torch.tensor([500.0]), "height": 32, "width": 32}
    with torch.no_grad():
        video = network(x, encoder_hidden_states=text, fps=24.0, **call).sample
        slow = network(x, encoder_hidden_states=text, fps=8.0, **call).sample
        first = network(x[:, :, :1], encoder_hidden_states=text, fps=24.0, **call).sample
    assert torch.equal(video, slow)
    torch.testing.assert_close(video[:, :, :1], first)


def test_null_text_has_a_maximal_length() -> None:
    network = transformer()
    assert torch.equal(network.null_text(4), network.y_embedder.y_embedding[:4])
    with pytest.raises(ValueError, match="the text has 10 tokens, but the network takes at most 9"):
        network.null_text(10)


def test_impossible_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads of 5 channels"):
        OpenSoraTransformer3DModel(3, 5, num_layers=1)


def test_patches_of_several_frames() -> None:
    """Padding of the last patch is removed; a frame mask inside a patch is refused."""
    network = transformer(patch_size=(2, 1, 2))
    video, text = torch.randn(1, 4, 5, 4, 6), torch.randn(1, 3, 24)
    call = {"timestep": torch.tensor([500.0]), "fps": 24.0, "height": 32, "width": 48}
    output = network(video, encoder_hidden_states=text, **call).sample
    assert output.shape == (1, 8, 5, 4, 6)
    with pytest.raises(ValueError, match="patches span several"):
        network(
            video, encoder_hidden_states=text, frame_mask=torch.ones(1, 5, dtype=torch.bool), **call
        )
