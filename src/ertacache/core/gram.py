"""Profile accumulation: what one pass of the untouched run leaves, whatever the latent's size.

Inner products, means and L1 distances of the run's latents and outputs, one set per prompt. They
are joined over prompts and added up over pieces of a latent. Knows no file and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ertacache.core.solver import Trajectory

__all__ = ["RunStatistics", "fit_nominal", "profile_run"]

CHUNK = 1 << 16  # elements cast to float64 at a time: bounds memory for any latent


@dataclass(frozen=True, eq=False)
class RunStatistics:
    """Statistics of reference runs; P prompts, T steps, R = 2T + 1 vectors x_0..x_T, v_0..v_{T-1}.

    Attributes:
        inner: mean over elements of the products of any two vectors, shape (P, R, R).
        means: mean of each vector's elements, shape (P, R).
        residual_l1: mean absolute difference of the residuals v - x of two steps, (P, T, T).
        residual_norm: mean absolute value of each step's residual, (P, T).
        output_l1: mean absolute difference of the outputs of two steps, (P, T, T).
        output_norm: mean absolute value of each step's output, (P, T).
        elements: number of elements averaged over, int64, (P,).
    """

    inner: Tensor
    means: Tensor
    residual_l1: Tensor
    residual_norm: Tensor
    output_l1: Tensor
    output_norm: Tensor
    elements: Tensor

    def __post_init__(self) -> None:
        """Check shapes, types, finiteness and symmetry."""
        if self.residual_norm.ndim != 2 or 0 in self.residual_norm.shape:
            raise ValueError("residual_norm must have shape (P, T) with P and T at least 1")
        P, T = self.residual_norm.shape
        R = 2 * T + 1
        shapes = ((P, R, R), (P, R), (P, T, T), (P, T), (P, T, T), (P, T), (P,))
        for field, shape in zip(fields(self), shapes, strict=True):
            value: Tensor = getattr(self, field.name)
            dtype = torch.int64 if field.name == "elements" else torch.float64
            if value.dtype != dtype or value.shape != shape:
                raise ValueError(f"{field.name} must be {dtype} of shape {shape}")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{field.name} holds a number that is not finite")
        for name in ("inner", "residual_l1", "output_l1"):
            matrix: Tensor = getattr(self, name)
            if not torch.equal(matrix, matrix.mT):
                raise ValueError(f"{name} must be symmetric")
        if bool((self.elements < 1).any()):
            raise ValueError("elements must be positive")

    @property
    def num_prompts(self) -> int:
        """Number of prompts P."""
        return self.residual_norm.shape[0]

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return self.residual_norm.shape[1]

    def select(self, prompts: Sequence[int]) -> RunStatistics:
        """The statistics of some of the prompts, given by their numbers."""
        return RunStatistics(**{f.name: getattr(self, f.name)[list(prompts)] for f in fields(self)})

    def join(self, *others: RunStatistics) -> RunStatistics:
        """Put the prompts of several profiles of the same steps side by side."""
        if any(other.num_steps != self.num_steps for other in others):
            raise ValueError("statistics of different step counts cannot be joined")
        parts = (self, *others)
        joined = {f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(self)}
        return RunStatistics(**joined)

    def __add__(self, other: RunStatistics) -> RunStatistics:
        """Statistics of the same prompts over the elements of both: pieces of one latent."""
        if self.residual_norm.shape != other.residual_norm.shape:
            raise ValueError("pieces to be added must have the same prompts and steps")
        elements = self.elements + other.elements
        share = other.elements.double() / elements

        def blend(a: Tensor, b: Tensor) -> Tensor:
            return a + (b - a) * share.view(-1, *[1] * (a.ndim - 1))

        means = {
            f.name: blend(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
            if f.name != "elements"
        }
        return RunStatistics(**means, elements=elements)


def profile_run(run: Trajectory) -> RunStatistics:
    """Profile an untouched run in float64: one set of statistics per prompt of its batch.

    Example:
        >>> from ertacache.core.solver import run_reference
        >>> table = torch.tensor([1.0, 0.5, 0.0])
        >>> noise = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
        >>> stats = profile_run(run_reference(lambda x, sigma: x, noise, sigmas=table))
        >>> stats.inner[:, 0, 0]  # mean square of x_0, one per prompt
        tensor([5., 4.], dtype=torch.float64)
    """
    latents = [x.flatten(1) for x in run.latents]
    outputs = [v.flatten(1) for v in run.outputs]
    total: RunStatistics | None = None
    for start in range(0, latents[0].shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        piece = _profile_piece([x[:, part] for x in latents], [v[:, part] for v in outputs])
        total = piece if total is None else total + piece
    if total is None:
        raise ValueError("the run's latents have no elements")
    return total


def fit_nominal(statistics: RunStatistics, *, latent: float | None = 1.0) -> Tensor:
    """First-order update ``x[k+1] = c x[k] + b v[k]`` of an unknown linear scheduler, shape (T, 2).

    Least squares over all prompts; exact for Euler and DDIM.

    Args:
        statistics: profile of the scheduler's untouched runs.
        latent: c when it is known (1 for flow models), None to fit it.
    """
    T = statistics.num_steps
    G = statistics.inner.mean(0)
    k = torch.arange(T)
    x, y, v = k, k + 1, T + 1 + k
    if latent is not None:
        b = (G[y, v] - latent * G[x, v]) / G[v, v].clamp_min(torch.finfo(G.dtype).tiny)
        return torch.stack([torch.full_like(b, latent), b], dim=1)
    A = torch.stack([torch.stack([G[x, x], G[x, v]], -1), torch.stack([G[v, x], G[v, v]], -1)], -2)
    rhs = torch.stack([G[x, y], G[v, y]], -1)
    solution: Tensor = torch.linalg.lstsq(A, rhs[..., None]).solution
    return solution[..., 0]


def _profile_piece(latents: Sequence[Tensor], outputs: Sequence[Tensor]) -> RunStatistics:
    x = torch.stack(list(latents), dim=1).double()  # (P, T + 1, n)
    v = torch.stack(list(outputs), dim=1).double()  # (P, T, n)
    P, n = x.shape[0], x.shape[-1]
    rows = torch.cat([x, v], dim=1)
    r = v - x[:, :-1]
    return RunStatistics(
        inner=_symmetric(rows @ rows.mT / n),
        means=rows.mean(-1),
        residual_l1=_symmetric(torch.cdist(r, r, p=1.0) / n),
        residual_norm=r.abs().mean(-1),
        output_l1=_symmetric(torch.cdist(v, v, p=1.0) / n),
        output_norm=v.abs().mean(-1),
        elements=torch.full((P,), n, dtype=torch.int64),
    )


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
