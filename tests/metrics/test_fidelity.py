from __future__ import annotations

import math

import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from ertacache.metrics import psnr, ssim


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(*shape, generator=generator)
    return a, (a + 0.1 * torch.rand(*shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("shape", [(2, 3, 16, 20), (2, 3, 7, 9), (2, 3, 64, 64)])
def test_pictures_agree_with_scikit_image(shape: tuple[int, ...]) -> None:
    a, b = pair(*shape)
    for k in range(2):
        x, y = a[k].double().numpy(), b[k].double().numpy()
        expected = peak_signal_noise_ratio(y, x, data_range=1.0)
        assert psnr(a, b)[k].item() == pytest.approx(expected, abs=1e-6)
        expected = structural_similarity(x, y, channel_axis=0, data_range=1.0)
        assert ssim(a, b)[k].item() == pytest.approx(expected, abs=1e-6)


def test_a_video_is_the_mean_over_its_frames() -> None:
    a, b = pair(1, 4, 3, 16, 16)
    frames = [ssim(a[:, k], b[:, k]).item() for k in range(4)]
    assert ssim(a, b).item() == pytest.approx(sum(frames) / 4)


def test_flat_pictures_agree_with_scikit_image() -> None:
    a, b = torch.full((1, 3, 16, 16), 0.25), torch.full((1, 3, 16, 16), 0.75)
    b[..., 8:] = 0
    x, y = a[0].double().numpy(), b[0].double().numpy()
    expected = structural_similarity(x, y, channel_axis=0, data_range=1.0)
    assert ssim(a, b).item() == pytest.approx(expected, abs=1e-6)


def test_a_long_video_goes_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(2, 5, 3, 16, 16)
    whole = ssim(a, b)
    monkeypatch.setattr("ertacache.metrics.fidelity.PIXELS_AT_ONCE", 1)
    assert ssim(a, b).tolist() == pytest.approx(whole.tolist())


def test_identical_and_different_shapes() -> None:
    a, _ = pair(1, 3, 16, 16)
    assert psnr(a, a).item() == math.inf
    assert ssim(a, a).item() == 1.0
    with pytest.raises(ValueError, match="differ"):
        psnr(a, a[..., :8])
    with pytest.raises(ValueError, match="7 x 7 or more, not 6 x 16"):
        ssim(a[..., :6, :], a[..., :6, :])
