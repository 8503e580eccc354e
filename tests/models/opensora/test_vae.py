"""The autoencoder of videos against the public implementation, and as a diffusers model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ertacache.models.opensora import AutoencoderKLOpenSora
from tests.models.opensora.small import GOLDEN, autoencoder, golden


@pytest.fixture(scope="module")
def public() -> dict[str, Tensor]:
    return golden("autoencoder")


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLOpenSora:
    return autoencoder()


def encode(vae: AutoencoderKLOpenSora, video: Tensor) -> Tensor:
    with torch.no_grad():
        return vae.encode(video).latent_dist.mode()


def decode(vae: AutoencoderKLOpenSora, latents: Tensor, num_frames: int | None = None) -> Tensor:
    with torch.no_grad():
        return vae.decode(latents, num_frames=num_frames).sample


def test_agrees_with_the_public_implementation(
    vae: AutoencoderKLOpenSora, public: dict[str, Tensor]
) -> None:
    """22 frames: one full micro frame, and one of 5 frames.

    Processors round convolutions differently, and the decoder amplifies it to 1.4e-4.
    """
    latents = encode(vae, public["video"])
    video = decode(vae, public["noise"], 22)
    torch.testing.assert_close(latents, public["latents"], rtol=0, atol=1e-4)
    torch.testing.assert_close(video, public["decoded"], rtol=0, atol=1e-3)


def test_full_size_has_the_published_keys_and_shapes() -> None:
    published = json.loads((GOLDEN / "keys.json").read_text())["vae"]
    with torch.device("meta"):
        state = AutoencoderKLOpenSora().state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == published
    assert len(state) == 517


@pytest.mark.parametrize("num_frames", [1, 2, 4, 5, 17, 18])
def test_shapes_of_encode_and_decode(vae: AutoencoderKLOpenSora, num_frames: int) -> None:
    latents = encode(vae, torch.randn(2, 3, num_frames, 8, 8).clamp(-1, 1))
    assert latents.shape == (2, 4, vae.latent_frames(num_frames), 1, 1)
    assert decode(vae, latents, num_frames).shape == (2, 3, num_frames, 8, 8)


def test_micro_frames_are_independent(vae: AutoencoderKLOpenSora) -> None:
    video = torch.randn(1, 3, 20, 8, 8).clamp(-1, 1)
    other = video.clone()
    other[:, :, 17:] = 0
    assert torch.equal(encode(vae, video)[:, :, :5], encode(vae, other)[:, :, :5])
    assert not torch.equal(encode(vae, video)[:, :, 5:], encode(vae, other)[:, :, 5:])


def test_latents_are_normalised(vae: AutoencoderKLOpenSora) -> None:
    """Mean and deviation are those of ``(z - shift) / scale`` of the temporal autoencoder."""
    video = torch.randn(1, 3, 4, 8, 8).clamp(-1, 1)
    with torch.no_grad():
        moments = vae.temporal_vae.encode(vae.spatial_vae.encode(video, None))
        normal = vae.encode(video).latent_dist
    mean, logvar = moments.chunk(2, dim=1)
    torch.testing.assert_close(normal.mean * vae.scale + vae.shift, mean)
    torch.testing.assert_close(normal.std * vae.scale, (0.5 * logvar).exp())


def test_generator_samples_the_spatial_latents(vae: AutoencoderKLOpenSora) -> None:
    video = torch.randn(1, 3, 4, 8, 8).clamp(-1, 1)

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            return vae.encode(video, generator=generator).latent_dist.mode()

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert not torch.equal(draw(0), encode(vae, video))


def test_without_a_number_all_frames_are_decoded(vae: AutoencoderKLOpenSora) -> None:
    assert decode(vae, torch.randn(1, 4, 5, 1, 1)).shape[2] == 17
    assert decode(vae, torch.randn(1, 4, 7, 1, 1)).shape[2] == 25


def test_wrong_number_of_frames_is_refused(vae: AutoencoderKLOpenSora) -> None:
    with pytest.raises(ValueError, match="51 frames have 15 latent frames, but there are 5"):
        vae.decode(torch.zeros(1, 4, 5, 1, 1), num_frames=51)


def test_round_trip(vae: AutoencoderKLOpenSora, tmp_path: Path) -> None:
    vae.save_pretrained(tmp_path)
    again = AutoencoderKLOpenSora.from_pretrained(tmp_path)
    state, loaded = vae.state_dict(), again.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    latents = torch.randn(1, 4, 5, 1, 1)  # the rounding depends on memory alignment
    torch.testing.assert_close(decode(again, latents), decode(vae, latents))


def test_forward_encodes_and_decodes(vae: AutoencoderKLOpenSora) -> None:
    video = torch.randn(1, 3, 5, 8, 8).clamp(-1, 1)
    with torch.no_grad():
        assert torch.equal(vae(video).sample, decode(vae, encode(vae, video), 5))
