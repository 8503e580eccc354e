"""The images or videos of a pipeline's call, whatever form they come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ertacache.metrics.image import to_pixels

__all__ = ["results_of"]


def results_of(result: Any) -> Tensor:
    """The images or videos of a call as a batch with values from 0 to 1, on the CPU.

    A batch of any form; otherwise the first entry of a tuple, list, mapping or output class.

    Example:
        >>> import torch
        >>> image = torch.zeros(3, 4, 4)
        >>> results_of(image[None]).shape, results_of({"images": [image]}).shape
        (torch.Size([1, 3, 4, 4]), torch.Size([1, 3, 4, 4]))
    """
    return to_pixels(result if _is_batch(result) else _first(result)).float().cpu()


def _is_batch(result: Any) -> bool:
    """Whether a result is a batch by itself: a tensor, an array, or a list of images."""
    if isinstance(result, list):
        return bool(result) and not isinstance(result[0], list | tuple) and not _many(result[0])
    return hasattr(result, "shape")


def _many(value: Any) -> bool:
    return len(getattr(value, "shape", ())) > 3


def _first(result: Any) -> Any:
    if isinstance(result, Mapping):
        return next(iter(result.values()))
    named = (getattr(result, name, None) for name in ("images", "frames", "videos"))
    found = next((value for value in named if value is not None), None)
    return result[0] if found is None else found
