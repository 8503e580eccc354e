"""Small least-squares problems, many at once: the one way in which coefficients are fitted.

Works on Gram matrices. Knows neither steps nor runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["solve_positive", "solve_ridge"]

JITTER = 1e-12  # of the diagonal: keeps systems of nearly parallel outputs solvable


def solve_ridge(
    A: Tensor, rhs: Tensor, nominal: Tensor, *, ridge: float, free_latent: bool
) -> Tensor:
    """Minimise ``z A z - 2 rhs z + ridge diag(A) (z - nominal)^2`` for B steps at once.

    Args:
        A: products of latent and outputs with each other, (B, 1 + H, 1 + H).
        rhs: their products with the latent to be reached, (B, 1 + H).
        nominal: coefficients of latent and newest output in the nominal update, (2,).
        ridge: strength of the pull towards it.
        free_latent: fit the latent's coefficient; otherwise it stays nominal.

    Returns:
        The coefficients, (B, 1 + H); 0 for an output that does not exist (a zero row of ``A``).
    """
    diagonal = A.diagonal(dim1=1, dim2=2)
    floor = JITTER * diagonal.amax(1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    pull = ridge * diagonal + floor
    prior = torch.zeros_like(rhs)
    prior[:, :2] = nominal
    A = A + pull.diag_embed()
    rhs = rhs + pull * prior
    if free_latent:
        return solve_positive(A, rhs)
    c = prior[:, :1]
    return torch.cat([c, solve_positive(A[:, 1:, 1:], rhs[:, 1:] - c * A[:, 1:, 0])], dim=1)


def solve_positive(A: Tensor, b: Tensor) -> Tensor:
    """Solve B small positive definite systems by elimination over the batch.

    Example:
        >>> solve_positive(torch.tensor([[[4.0, 2.0], [2.0, 2.0]]]), torch.tensor([[8.0, 6.0]]))
        tensor([[1., 2.]])
    """
    M = torch.cat([A, b[..., None]], dim=-1).permute(1, 2, 0).contiguous()  # (n, n + 1, B)
    n = len(M)
    for i in range(n):
        row = M[i, i:] / M[i, i]
        M[:, i:] -= M[:, i, None] * row
        M[i, i:] = row
    return M[:, n].T
