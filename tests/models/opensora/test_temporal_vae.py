"""The temporal autoencoder against the public implementation; causality."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.models.opensora.temporal_vae import TemporalVAE
from tests.models.opensora.small import autoencoder, golden


@pytest.fixture(scope="module")
def public() -> dict[str, Tensor]:
    return golden("autoencoder")


@pytest.fixture(scope="module")
def vae() -> TemporalVAE:
    return autoencoder().temporal_vae


@pytest.mark.parametrize("num_frames", [17, 6])
def test_agrees_with_the_public_implementation(
    vae: TemporalVAE, public: dict[str, Tensor], num_frames: int
) -> None:
    with torch.no_grad():
        moments = vae.encode(public[f"spatial{num_frames}"])
        video = vae.decode(public[f"latents{num_frames}"], num_frames=num_frames)
    assert video.shape[2] == num_frames
    torch.testing.assert_close(moments, public[f"moments{num_frames}"], rtol=0, atol=1e-5)
    torch.testing.assert_close(video, public[f"decoded{num_frames}"], rtol=0, atol=1e-5)


def test_recipe_makes_the_weights_that_the_public_code_had(
    vae: TemporalVAE, public: dict[str, Tensor]
) -> None:
    assert torch.equal(vae.encoder.conv_in.conv.weight[:2], public["weight"])


def test_convolutions_are_causal() -> None:
    """Tested on one layer: group norms mix all frames."""
    conv = autoencoder().temporal_vae.encoder.conv_in
    x = torch.randn(1, 4, 6, 3, 3)
    later = x.clone()
    later[:, :, 4:] += 1
    with torch.no_grad():
        same = (conv(x) == conv(later)).all(dim=(0, 1, 3, 4))
    assert same.tolist() == [True] * 4 + [False] * 2


def test_levels_and_halvings_must_fit() -> None:
    with pytest.raises(ValueError, match="3 levels need 2 entries"):
        TemporalVAE(4, widths=(8, 8, 8), halve=(True,), layers=1, groups=4)
