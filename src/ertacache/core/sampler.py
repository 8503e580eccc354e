"""Runs over any ``denoise(x, sigma) -> v``: the full run, and a run of any stepper.

A stepper is what a method does on one step of a run, ``step(k, x, v, advance)``. v is None on a
reused step; ``advance`` is the scheduler's own step. The same steppers run in pipelines, driven by
``integration``; the tests hold both to the same latents. A stepper is made fresh for every run and
knows neither pipelines nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from ertacache.core.gram import Trajectory

__all__ = [
    "Advance",
    "Denoise",
    "Euler",
    "Solver",
    "SolverFactory",
    "StepTaken",
    "Stepper",
    "run",
    "run_reference",
    "run_steps",
]

Denoise = Callable[[Tensor, Tensor], Tensor]
"""``denoise(sample, sigma) -> model_output``; sigma is a 0-dim tensor of the schedule's dtype."""


class Solver(Protocol):
    """One run of a deterministic linear solver; it may keep a history between its steps."""

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        """Return the latent after ``step``."""
        ...


SolverFactory = Callable[[Tensor], Solver]
"""Makes a fresh solver for a sigma schedule of T + 1 entries."""


Advance = Callable[[Tensor], Tensor]
"""The scheduler's own step from the present latent: the output to use in, the next latent out."""


class Stepper(Protocol):
    """One run of one method."""

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T that it was made for."""
        ...

    @property
    def sigmas(self) -> Tensor | None:
        """The sigma schedule that the run has to have, (T + 1,); None keeps the scheduler's."""
        ...

    @property
    def flexible(self) -> bool:
        """Whether a step that is to be reused may be computed instead."""
        ...

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        ...

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Return the latent after step ``k``.

        Args:
            k: number of the step.
            x: the latent before it, in float32 or finer.
            v: the network's output at x; None on a reused step.
            advance: the scheduler's own step.
        """
        ...

    def note_branch(self, raw: Tensor) -> None:
        """Note the raw output of one guidance branch, before the step with its combined output."""
        ...

    def switch(self) -> None:
        """Note that the next output is that of another network."""
        ...

    def held(self) -> Iterable[Tensor]:
        """The tensors kept between steps."""
        ...


class Euler:
    """Eq. 4: ``x[k+1] = x[k] + (sigma[k+1] - sigma[k]) v[k]``.

    Example:
        >>> import torch
        >>> solver = Euler(torch.tensor([1.0, 0.5, 0.0]))
        >>> solver.step(torch.tensor([2.0]), 0, torch.tensor([3.0]))
        tensor([2.])
    """

    def __init__(self, sigmas: Tensor) -> None:
        """Keep the intervals of the schedule as Python numbers."""
        self._intervals: list[float] = sigmas.double().diff().tolist()

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        """Return the latent after ``step``."""
        return sample + self._intervals[step] * model_output


def run_reference(
    denoise: Denoise, sample: Tensor, *, sigmas: Tensor, solver: SolverFactory = Euler
) -> Trajectory:
    """The full run: evaluate the network on every step, keep all latents and outputs.

    Args:
        denoise: the network.
        sample: the noise x_0, shape (P, ...).
        sigmas: the sigma schedule, shape (T + 1,).
        solver: makes the solver for the schedule.

    Example:
        >>> import torch
        >>> sigmas = torch.tensor([1.0, 0.5, 0.0])
        >>> full = run_reference(lambda x, sigma: 2 * x, torch.tensor([[1.0]]), sigmas=sigmas)
        >>> [x.item() for x in full.latents]
        [1.0, 0.0, 0.0]
    """
    steps = solver(sigmas)
    latents, outputs = [sample], []
    for k in range(len(sigmas) - 1):
        outputs.append(denoise(latents[-1], sigmas[k]))
        latents.append(steps.step(outputs[-1], k, latents[-1]))
    return Trajectory(tuple(latents), tuple(outputs))


def run(
    denoise: Denoise,
    sample: Tensor,
    stepper: Stepper,
    *,
    sigmas: Tensor,
    solver: SolverFactory = Euler,
) -> tuple[Tensor, ...]:
    """Run a stepper: the network on its computed steps, its update on all of them.

    Args:
        denoise: the network.
        sample: the noise x_0, shape (P, ...).
        stepper: what each step does; fresh.
        sigmas: the nominal sigma schedule, shape (T + 1,); the stepper may bring an adjusted one.
        solver: makes the solver that stands for the scheduler.

    Returns:
        The latents x_0 ... x_T.

    Example:
        >>> import torch
        >>> from ertacache.core.plans import PaperPlan
        >>> from ertacache.core.paper_steppers import PaperStepper
        >>> sigmas = torch.tensor([1.0, 0.5, 0.25, 0.0]).double()
        >>> plan = PaperPlan((0, 2), "velocity", sigmas)  # plain reuse on step 1
        >>> latents = run(lambda x, sigma: x, torch.ones(1), PaperStepper(plan), sigmas=sigmas)
        >>> [x.item() for x in latents]
        [1.0, 0.5, 0.25, 0.1875]
    """
    steps = run_steps(denoise, sample, stepper, sigmas=sigmas, solver=solver)
    return (sample, *(taken.latent for taken in steps))


class StepTaken(NamedTuple):
    """One step of a run.

    Attributes:
        step: its number k.
        sigma: the noise level before it, a 0-dim tensor.
        next_sigma: the noise level after it.
        sample: the latent before it.
        model_output: the network's output; None on a reused step.
        latent: the latent after it.
    """

    step: int
    sigma: Tensor
    next_sigma: Tensor
    sample: Tensor
    model_output: Tensor | None
    latent: Tensor


def run_steps(
    denoise: Denoise,
    sample: Tensor,
    stepper: Stepper,
    *,
    sigmas: Tensor,
    solver: SolverFactory = Euler,
) -> Iterator[StepTaken]:
    """The steps of ``run``, one after the other; nothing is kept but by the stepper."""
    if len(sigmas) != stepper.num_steps + 1:
        raise ValueError(
            f"a run of {stepper.num_steps} steps, but a sigma schedule of {len(sigmas) - 1}"
        )
    schedule = sigmas if stepper.sigmas is None else stepper.sigmas
    steps, x = solver(schedule), sample
    for k in range(len(schedule) - 1):
        v = denoise(x, schedule[k]) if stepper.computes(k) else None
        latent = stepper.step(k, x, v, partial(steps.step, step=k, sample=x))
        yield StepTaken(k, schedule[k], schedule[k + 1], x, v, latent)
        x = latent
