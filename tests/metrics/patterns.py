"""Images given by integer formulas: the same bits on every machine, without files."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distorted", "pattern"]


def pattern(height: int, width: int) -> Tensor:
    """An image of shape (1, 3, height, width) with values k / 255."""
    return _levels(height, width).double() / 255


def distorted(height: int, width: int) -> Tensor:
    """The same image, each level moved by -20 to 20."""
    c, y, x = _indices(height, width)
    moved = _levels(height, width) + (x * x + 3 * y + 11 * c) % 41 - 20
    return moved.clamp(0, 255).double() / 255


def _levels(height: int, width: int) -> Tensor:
    c, y, x = _indices(height, width)
    return ((3 + c) * x + (5 + 2 * c) * y + (c + 1) * (x * y // 7)) % 256


def _indices(height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    c = torch.arange(3).reshape(1, 3, 1, 1)
    y = torch.arange(height).reshape(1, 1, -1, 1)
    x = torch.arange(width).reshape(1, 1, 1, -1)
    return c, y, x
