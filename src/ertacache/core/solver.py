"""Reference solvers and the untouched run: the target that every method is measured against.

A solver turns one network output into the next latent. Any deterministic linear one will do; the
methods never ask which it is. Knows no schedule of computed and reused steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "AdamsBashforth",
    "Denoise",
    "Euler",
    "LinearSolver",
    "Solver",
    "SolverFactory",
    "Trajectory",
    "run_reference",
]

Denoise = Callable[[Tensor, Tensor], Tensor]
"""``denoise(sample, sigma) -> model_output``; sigma is a 0-dim tensor of the table's dtype."""


class Solver(Protocol):
    """One run of a deterministic linear solver; it may keep a history between its steps."""

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        """Return the latent after ``step``."""
        ...


SolverFactory = Callable[[Tensor], Solver]
"""Makes a fresh solver for a sigma table of T + 1 entries."""


class Euler:
    """Eq. 4: ``x[k+1] = x[k] + (sigma[k+1] - sigma[k]) v[k]``.

    Example:
        >>> solver = Euler(torch.tensor([1.0, 0.5, 0.0]))
        >>> solver.step(torch.tensor([2.0]), 0, torch.tensor([3.0]))
        tensor([2.])
    """

    def __init__(self, sigmas: Tensor) -> None:
        """Keep the intervals of the table as Python numbers."""
        self._intervals: list[float] = sigmas.double().diff().tolist()

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        """Return the latent after ``step``."""
        return sample + self._intervals[step] * model_output


class LinearSolver:
    """``x[k+1] = latent[k] x[k] + sum_j outputs[k, j] v[k-j]``: DDIM, Adams-Bashforth and kin.

    Example:
        >>> halve = LinearSolver(torch.tensor([0.5]), torch.tensor([[1.0]]))
        >>> halve.step(torch.tensor([3.0]), 0, torch.tensor([4.0]))
        tensor([5.])
    """

    def __init__(self, latent: Tensor, outputs: Tensor) -> None:
        """Keep the coefficients: ``latent`` of shape (T,), ``outputs`` of shape (T, M)."""
        self._latent: list[float] = latent.tolist()
        self._outputs: list[list[float]] = outputs.tolist()
        self._past: list[Tensor] = []

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        """Return the latent after ``step``."""
        weights = self._outputs[step]
        self._past = [model_output, *self._past][: len(weights)]
        x = self._latent[step] * sample
        for b, v in zip(weights, self._past, strict=False):
            x = x + b * v
        return x


class AdamsBashforth(LinearSolver):
    """Second-order Adams-Bashforth on a non-uniform table; its first step is Euler's."""

    def __init__(self, sigmas: Tensor) -> None:
        """Integrate the line through the last two outputs over each interval."""
        d = sigmas.double().diff()
        ratio = torch.zeros_like(d)
        # After a step of no length the last two outputs tell no slope: Euler's step again.
        ratio[1:] = torch.where(d[:-1] == 0, 0.0, d[1:] / d[:-1])
        outputs = torch.stack([d * (1 + ratio / 2), -d * ratio / 2], dim=1)
        super().__init__(torch.ones_like(d), outputs)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """An untouched run.

    Attributes:
        latents: x_0 ... x_T, each of shape (P, ...).
        outputs: v_0 ... v_{T-1}, like the latents.
    """

    latents: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.outputs)


def run_reference(
    denoise: Denoise, sample: Tensor, *, sigmas: Tensor, solver: SolverFactory = Euler
) -> Trajectory:
    """Run every step with the network and keep all latents and outputs.

    Args:
        denoise: the network.
        sample: the noise x_0, shape (P, ...).
        sigmas: the table, shape (T + 1,).
        solver: makes the solver for the table.

    Example:
        >>> table = torch.tensor([1.0, 0.5, 0.0])
        >>> run = run_reference(lambda x, sigma: 2 * x, torch.tensor([[1.0]]), sigmas=table)
        >>> [x.item() for x in run.latents]
        [1.0, 0.0, 0.0]
    """
    steps = solver(sigmas)
    latents, outputs = [sample], []
    for k in range(len(sigmas) - 1):
        outputs.append(denoise(latents[-1], sigmas[k]))
        latents.append(steps.step(outputs[-1], k, latents[-1]))
    return Trajectory(tuple(latents), tuple(outputs))
