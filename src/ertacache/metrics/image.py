"""PSNR and SSIM of images and videos, and tensors as 8-bit images.

Values range from 0 to 1. Each entry of a batch is evaluated by itself. A video has one PSNR, of the
squared error over all its frames; its SSIM is the mean over frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "IDENTICAL",
    "as_frames",
    "check_pair",
    "in_batches",
    "psnr",
    "ssim",
    "to_image",
    "to_levels",
    "to_pixels",
]

IDENTICAL = 100.0  # dB that an identical result counts as in a mean, and no result more
WINDOW = 7  # pixels
C1, C2 = 0.01**2, 0.03**2  # keep quotients of flat windows finite
PIXELS_AT_ONCE = 1 << 20  # bounds the memory for a long video


def psnr(result: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of each entry of a batch, infinite where it is identical.

    -10 log10 of the mean squared error over all values of the entry: of a video over all frames.

    Args:
        result: values from 0 to 1, shape (B, ...).
        reference: what it is compared with, of the same shape.

    Example:
        >>> psnr(torch.full((1, 3, 4, 4), 0.5), torch.full((1, 3, 4, 4), 0.6)).round().tolist()
        [20.0]
    """
    check_pair(result, reference)
    error = (result.double() - reference.double()).square().flatten(1).mean(1)
    return -10 * torch.log10(error)


def ssim(result: Tensor, reference: Tensor) -> Tensor:
    """Structural similarity of each entry of a batch, the mean over the frames of a video.

    Windows of 7 x 7 pixels with equal weights, sample covariances, the mean over channels: the
    defaults of scikit-image, and the same values.

    Args:
        result: values from 0 to 1, shape (B, 3, height, width) or (B, frames, 3, height, width),
            both sides at least 7 pixels.
        reference: what it is compared with, of the same shape.

    Example:
        >>> x = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8).expand(1, 3, 8, 8)
        >>> round(ssim(0.5 * x, x).item(), 4)
        0.6418
    """
    check_pair(result, reference)
    height, width = result.shape[-2:]
    if min(height, width) < WINDOW:
        raise ValueError(f"SSIM needs images of 7 x 7 or more, not {height} x {width}")
    size = max(1, PIXELS_AT_ONCE // (height * width))
    pairs = [in_batches(as_frames(x), size) for x in (result, reference)]
    values = [
        _similarity(a.double(), b.double()).flatten(1).mean(1) for a, b in zip(*pairs, strict=True)
    ]
    return torch.cat(values).reshape(len(result), -1).mean(1).cpu()


def _similarity(x: Tensor, y: Tensor) -> Tensor:
    """SSIM at every position where a whole window fits (Wang et al. 2004, equation 13)."""
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = (
        F.avg_pool2d(z, WINDOW, stride=1) for z in (x, y, x * x, y * y, x * y)
    )
    sample = WINDOW**2 / (WINDOW**2 - 1)
    var_x, var_y = sample * (mean_xx - mean_x**2), sample * (mean_yy - mean_y**2)
    cov = sample * (mean_xy - mean_x * mean_y)
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return luminance * (2 * cov + C2) / (var_x + var_y + C2)


def check_pair(result: Tensor, reference: Tensor) -> None:
    """Raise if two batches cannot be compared entry by entry."""
    if result.shape != reference.shape:
        raise ValueError(f"shapes {tuple(result.shape)} and {tuple(reference.shape)} differ")


def as_frames(x: Tensor) -> Tensor:
    """Images or the frames of videos in one batch, shape (N, 3, height, width).

    Example:
        >>> as_frames(torch.zeros(2, 5, 3, 8, 8)).shape
        torch.Size([10, 3, 8, 8])
    """
    if x.ndim not in (4, 5) or x.shape[-3] != 3:
        raise ValueError(
            "images have the shape (B, 3, height, width) and videos (B, frames, 3, height, "
            f"width), not {tuple(x.shape)}"
        )
    return x.reshape(-1, *x.shape[-3:])


def in_batches(x: Tensor, size: int) -> Iterator[Tensor]:
    """The entries of a batch, at most ``size`` at a time."""
    for start in range(0, len(x), size):
        yield x[start : start + size]


def to_levels(pixels: Tensor) -> Tensor:
    """Values from 0 to 1 as bytes, rounded.

    Example:
        >>> to_levels(torch.tensor([-1.0, 0.2, 1.0]))
        tensor([  0,  51, 255], dtype=torch.uint8)
    """
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def to_pixels(images: Any) -> Tensor:
    """Images and videos in any form that pipelines return as a tensor (..., 3, height, width).

    Args:
        images: a tensor, which is returned as it is; an image; an array with the channels last; or
            a list of any of these, such as the frames of a video.

    Example:
        >>> to_pixels([to_image(torch.ones(3, 2, 4))]).shape
        torch.Size([1, 3, 2, 4])
    """
    if isinstance(images, Tensor):
        return images
    if isinstance(images, list | tuple):
        return torch.stack([to_pixels(image) for image in images])
    if hasattr(images, "tobytes") and hasattr(images, "convert"):
        image = images.convert("RGB")
        levels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        images = levels.reshape(image.height, image.width, 3)
    values = torch.as_tensor(images).movedim(-1, -3)
    return values / 255 if values.dtype == torch.uint8 else values


def to_image(pixels: Tensor, *, scale: int = 1) -> Image.Image:
    """Turn (3, height, width) with values from 0 to 1 into an image, each pixel ``scale`` wide."""
    from PIL import Image

    image = Image.fromarray(to_levels(pixels).permute(1, 2, 0).cpu().numpy())
    size = image.width * scale, image.height * scale
    return image.resize(size, Image.Resampling.NEAREST)
