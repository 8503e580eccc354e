"""Symmetric matrices as their upper triangles, the way files keep them. Knows no file."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_triangle", "unpack_triangle"]


def pack_triangle(matrix: Tensor) -> Tensor:
    """Upper triangles with their diagonals, row by row: (P, n, n) to (P, n (n + 1) / 2).

    Example:
        >>> pack_triangle(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]))
        tensor([[1., 2., 3.]])
    """
    row, column = torch.triu_indices(matrix.shape[-1], matrix.shape[-1])
    return matrix[:, row, column]


def unpack_triangle(packed: Tensor, size: int) -> Tensor:
    """The matrices again; undoes ``pack_triangle``."""
    row, column = torch.triu_indices(size, size)
    matrix = packed.new_empty(len(packed), size, size)
    matrix[:, row, column] = packed
    matrix[:, column, row] = packed
    return matrix
