from __future__ import annotations

import math

import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from ertacache.metrics import psnr, ssim
from ertacache.metrics.image import to_image, to_pixels


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(*shape, generator=generator)
    return a, (a + 0.1 * torch.rand(*shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("shape", [(2, 3, 16, 20), (2, 3, 7, 9), (2, 3, 64, 64)])
def test_images_agree_with_scikit_image(shape: tuple[int, ...]) -> None:
    a, b = pair(*shape)
    for k in range(2):
        x, y = a[k].double().numpy(), b[k].double().numpy()
        expected = peak_signal_noise_ratio(y, x, data_range=1.0)
        assert psnr(a, b)[k].item() == pytest.approx(expected, abs=1e-6)
        expected = structural_similarity(x, y, channel_axis=0, data_range=1.0)
        assert ssim(a, b)[k].item() == pytest.approx(expected, abs=1e-6)


def flat(*levels: float) -> torch.Tensor:
    """A video whose frames are of one level each."""
    return torch.tensor(levels).reshape(1, -1, 1, 1, 1).expand(1, len(levels), 3, 4, 4)


def test_psnr_of_a_video_is_of_the_error_over_all_frames() -> None:
    # Squared errors 0.01, 0.0001 and 0; the mean over frames would be (20 + 40 + 100) / 3.
    decibels = psnr(flat(0.1, 0.01, 0), flat(0, 0, 0)).item()
    assert decibels == pytest.approx(-10 * math.log10(0.0101 / 3))
    assert psnr(flat(0.5, 0.2), flat(0.5, 0.2)).item() == math.inf
    batch = psnr(torch.cat([flat(0.1, 0.1), flat(0.01, 0.01)]), torch.zeros(2, 2, 3, 4, 4))
    assert batch.tolist() == pytest.approx([20, 40])


def test_ssim_of_a_video_is_the_mean_over_its_frames() -> None:
    a, b = pair(1, 4, 3, 16, 16)
    frames = [ssim(a[:, k], b[:, k]).item() for k in range(4)]
    assert ssim(a, b).item() == pytest.approx(sum(frames) / 4)


def test_flat_images_agree_with_scikit_image() -> None:
    a, b = torch.full((1, 3, 16, 16), 0.25), torch.full((1, 3, 16, 16), 0.75)
    b[..., 8:] = 0
    x, y = a[0].double().numpy(), b[0].double().numpy()
    expected = structural_similarity(x, y, channel_axis=0, data_range=1.0)
    assert ssim(a, b).item() == pytest.approx(expected, abs=1e-6)


def test_a_long_video_goes_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(2, 5, 3, 16, 16)
    whole = ssim(a, b)
    monkeypatch.setattr("ertacache.metrics.image.PIXELS_AT_ONCE", 1)
    assert ssim(a, b).tolist() == pytest.approx(whole.tolist())


def test_identical_and_different_shapes() -> None:
    a, _ = pair(1, 3, 16, 16)
    assert psnr(a, a).item() == math.inf
    assert ssim(a, a).item() == 1.0
    with pytest.raises(ValueError, match="differ"):
        psnr(a, a[..., :8])
    with pytest.raises(ValueError, match="7 x 7 or more, not 6 x 16"):
        ssim(a[..., :6, :], a[..., :6, :])


def test_pixels_of_an_image_are_scaled_without_interpolation() -> None:
    pixels = torch.zeros(3, 2, 2)
    pixels[0, 0, 1] = 1.0
    image = to_image(pixels, scale=3)
    assert image.size == (6, 6)
    assert image.getpixel((3, 0)) == (255, 0, 0)
    assert image.getpixel((2, 0)) == (0, 0, 0)


def test_results_of_any_form_become_tensors() -> None:
    """Images, arrays with the channels last, and lists of either, as a video is; tensors stay."""
    pixels = torch.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4) / 255
    images = [to_image(frame) for frame in pixels]
    array = pixels.movedim(-3, -1).numpy()
    assert to_pixels(pixels) is pixels
    assert torch.equal(to_pixels(array), pixels)
    for found in (to_pixels(images), to_pixels((array * 255).round().astype("uint8"))):
        torch.testing.assert_close(found, pixels)
    assert to_pixels([images, images]).shape == (2, 2, 3, 2, 4)
    assert to_pixels(images[0].convert("L")).shape == (3, 2, 4)
