"""Metrics of videos over time: flickering, and how differently two videos move."""

from __future__ import annotations

from torch import Tensor

from ertacache.metrics.image import check_pair

__all__ = ["motion_error", "temporal_flickering"]


def temporal_flickering(video: Tensor) -> Tensor:
    """VBench's temporal flickering of each video, shape (B,): 1 for a still video.

    (255 - e) / 255, with e the mean absolute difference of consecutive frames in levels from 0 to
    255. It counts all motion as flicker: VBench uses it for prompts of still scenes.

    Args:
        video: values from 0 to 1, shape (B, frames, 3, height, width).

    Example:
        >>> import torch
        >>> video = torch.tensor([0.0, 0.2, 0.2]).reshape(1, 3, 1, 1, 1).expand(1, 3, 3, 4, 4)
        >>> round(temporal_flickering(video).item(), 6)
        0.9
    """
    error = 255 * _changes(video).abs().flatten(1).mean(1)
    return (255 - error) / 255


def motion_error(result: Tensor, reference: Tensor) -> Tensor:
    """How differently two videos move, shape (B,): 0 where every change is the same.

    The mean absolute difference between the frame-to-frame changes of the two videos. A constant
    offset does not count; flicker that the reference does not have does.

    Args:
        result: values from 0 to 1, shape (B, frames, 3, height, width).
        reference: what it is compared with, of the same shape.
    """
    check_pair(result, reference)
    return (_changes(result) - _changes(reference)).abs().flatten(1).mean(1)


def _changes(video: Tensor) -> Tensor:
    """Differences of consecutive frames, shape (B, frames - 1, 3, height, width)."""
    if video.ndim != 5:
        raise ValueError(
            f"videos have the shape (B, frames, 3, height, width), not {tuple(video.shape)}"
        )
    if video.shape[1] < 2:
        raise ValueError("a video of one frame has no motion")
    return video.double().diff(dim=1)
