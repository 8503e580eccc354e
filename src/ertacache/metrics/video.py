"""Videos: metrics frame by frame, and what only shows over time.

Knows no file. A metric of pictures is given as a function of two batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ertacache.metrics.fidelity import check_pair, psnr

__all__ = ["IDENTICAL", "frame_psnr", "motion_error", "per_frame", "temporal_flickering"]

IDENTICAL = 100.0  # dB that an identical frame or picture counts for in a mean


def per_frame(
    metric: Callable[[Tensor, Tensor], Tensor], result: Tensor, reference: Tensor
) -> Tensor:
    """A metric of pictures for every frame, shape (B, frames).

    Args:
        metric: takes two batches of pictures, returns a value for each entry.
        result: values from 0 to 1, shape (B, frames, 3, height, width).
        reference: what it should be, of the same shape.

    Example:
        >>> video = torch.zeros(1, 2, 3, 4, 4)
        >>> other = video.clone()
        >>> other[:, 1] = 0.1
        >>> per_frame(psnr, other, video).round().tolist()
        [[inf, 20.0]]
    """
    check_pair(result, reference)
    _check_video(result)
    values = metric(result.flatten(0, 1), reference.flatten(0, 1))
    return values.reshape(result.shape[:2])


def frame_psnr(result: Tensor, reference: Tensor) -> Tensor:
    """The mean of the PSNR of the frames, shape (B,); infinite if all frames are identical.

    A single identical frame counts for 100 dB, otherwise one would outweigh all others.
    """
    values = per_frame(psnr, result, reference)
    mean = values.clamp(max=IDENTICAL).mean(1)
    return torch.where(values.isinf().all(1), torch.inf, mean)


def temporal_flickering(video: Tensor) -> Tensor:
    """VBench's temporal flickering of each video, shape (B,): 1 where nothing moves.

    (255 - e) / 255, with e the mean absolute difference of consecutive frames in levels from 0 to
    255. It counts all motion as flicker: VBench means it for prompts of still scenes.

    Args:
        video: values from 0 to 1, shape (B, frames, 3, height, width).

    Example:
        >>> video = torch.tensor([0.0, 0.2, 0.2]).reshape(1, 3, 1, 1, 1).expand(1, 3, 3, 4, 4)
        >>> round(temporal_flickering(video).item(), 6)
        0.9
    """
    error = 255 * _steps(video).abs().flatten(1).mean(1)
    return (255 - error) / 255


def motion_error(result: Tensor, reference: Tensor) -> Tensor:
    """How differently two videos move, shape (B,): 0 where every change is the same.

    The mean absolute difference between the steps from frame to frame of the one and those of the
    other. A constant offset does not count, a flicker that the reference does not have does.

    Args:
        result: values from 0 to 1, shape (B, frames, 3, height, width).
        reference: what it should be, of the same shape.
    """
    check_pair(result, reference)
    return (_steps(result) - _steps(reference)).abs().flatten(1).mean(1)


def _steps(video: Tensor) -> Tensor:
    _check_video(video)
    if video.shape[1] < 2:
        raise ValueError("a video of one frame has no motion")
    return video.double().diff(dim=1)


def _check_video(video: Tensor) -> None:
    if video.ndim != 5:
        raise ValueError(
            f"videos have the shape (B, frames, 3, height, width), not {tuple(video.shape)}"
        )
