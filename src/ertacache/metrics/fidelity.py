"""PSNR and SSIM of pictures and videos with values from 0 to 1.

Both judge each picture or video of a batch by itself. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["psnr", "ssim"]


def psnr(result: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of each entry of a batch, infinite where it is identical.

    Args:
        result: values from 0 to 1, shape (B, ...).
        reference: what it should be, of the same shape.

    Example:
        >>> psnr(torch.full((1, 3, 4, 4), 0.5), torch.full((1, 3, 4, 4), 0.6)).round().tolist()
        [20.0]
    """
    _check(result, reference)
    error = (result.double() - reference.double()).square().flatten(1).mean(1)
    return -10 * torch.log10(error)


def ssim(result: Tensor, reference: Tensor) -> Tensor:
    """Structural similarity of each entry of a batch, the mean over the frames of a video.

    Args:
        result: values from 0 to 1, shape (B, 3, height, width) or (B, frames, 3, height, width).
        reference: what it should be, of the same shape.
    """
    from skimage import metrics

    similarity: Callable[..., float] = metrics.structural_similarity
    _check(result, reference)
    frames = [x.double().cpu().reshape(len(x), -1, *x.shape[-3:]) for x in (result, reference)]
    values = [
        [
            similarity(a.numpy(), b.numpy(), channel_axis=0, data_range=1.0)
            for a, b in zip(*pair, strict=True)
        ]
        for pair in zip(*frames, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).mean(1)


def _check(result: Tensor, reference: Tensor) -> None:
    if result.shape != reference.shape:
        raise ValueError(f"shapes {tuple(result.shape)} and {tuple(reference.shape)} differ")
