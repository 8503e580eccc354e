"""Which steps to compute: the paper's threshold search (Algorithm 2), and the uniform schedule.

A schedule is the ascending tuple of computed steps. The search runs either with the network, on the
accelerated trajectory as printed, or on the L1 distances of a profile. Knows no file and no plan.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ertacache.core.plan import Reuse
from ertacache.core.residual import Cache, relative_l1, safe_ratio
from ertacache.core.solver import Denoise, Euler, Solver, SolverFactory, Trajectory

__all__ = [
    "pick_schedule",
    "search_profile",
    "search_thresholds",
    "sweep_profile",
    "uniform_schedule",
]


def uniform_schedule(num_steps: int, budget: int) -> tuple[int, ...]:
    """``budget`` steps spread evenly, the first and the last among them: gaps differ by at most 1.

    Example:
        >>> uniform_schedule(10, 4)
        (0, 3, 6, 9)
        >>> uniform_schedule(10, 1)
        (0,)
    """
    if not 1 <= budget <= num_steps:
        raise ValueError(f"budget must be between 1 and {num_steps} steps, got {budget}")
    if budget == 1:
        return (0,)
    last, gaps = num_steps - 1, budget - 1
    # Integers: i * last / gaps rounded half up, distinct because last >= gaps.
    return tuple((2 * i * last + gaps) // (2 * gaps) for i in range(budget))


@dataclass(frozen=True, eq=False)
class _Branch:
    """Thresholds whose decisions agreed on all steps before ``step``, and the run they share."""

    thresholds: tuple[float, ...]
    compute_steps: tuple[int, ...]
    step: int
    sample: Tensor
    cache: Cache
    solver: Solver

    @property
    def untouched(self) -> bool:
        """Whether nothing was reused yet: then the run is still the reference run."""
        return len(self.compute_steps) == self.step


def search_thresholds(
    denoise: Denoise,
    reference: Trajectory,
    *,
    sigmas: Tensor,
    thresholds: Iterable[float],
    reuse: Reuse = "residual",
    solver: SolverFactory = Euler,
) -> dict[float, tuple[int, ...]]:
    """Algorithm 2: reuse step k while eq. 12 is below the threshold, for many thresholds at once.

    Thresholds walk together and part only where their decisions differ, so every network output is
    computed once; while nothing was reused, the reference run supplies it. The first and the last
    step are always computed. With ``reuse="velocity"`` outputs take the place of residuals.

    Args:
        denoise: the network.
        reference: the untouched run with the same network, table and solver.
        sigmas: the table, shape (T + 1,).
        thresholds: the values of lambda to try.
        reuse: what a reused step returns, and what eq. 12 compares.
        solver: makes the solver for the table; copied where thresholds part.

    Returns:
        The computed steps for every threshold, in ascending order of threshold.

    Example:
        >>> import torch
        >>> from ertacache.core.solver import run_reference
        >>> field, table = lambda x, sigma: 2 * x, torch.linspace(1, 0, 6)
        >>> run = run_reference(field, torch.ones(1, 1), sigmas=table)
        >>> search_thresholds(field, run, sigmas=table, thresholds=[0.1, 1.0, 3.0])
        {0.1: (0, 1, 2, 3, 4), 1.0: (0, 2, 4), 3.0: (0, 3, 4)}
    """
    last = len(sigmas) - 2
    if reference.num_steps != last + 1:
        raise ValueError(f"the table has {last + 1} steps, the reference {reference.num_steps}")
    found: dict[float, tuple[int, ...]] = {}
    stack = [_first_step(reference, solver(sigmas), reuse, _ascending(thresholds))]
    while stack:
        branch = stack.pop()
        if branch.step >= last:
            steps = (*branch.compute_steps, last) if last else branch.compute_steps
            found.update(dict.fromkeys(branch.thresholds, steps))
            continue
        k = branch.step
        known = reference.outputs[k] if branch.untouched else None
        v = denoise(branch.sample, sigmas[k]) if known is None else known
        truth = Cache.of(reference.outputs[k], reference.latents[k], reuse=reuse)
        stack.extend(_next_step(branch, v, truth))
    return {lam: found[lam] for lam in sorted(found)}


def _ascending(thresholds: Iterable[float]) -> tuple[float, ...]:
    values = tuple(sorted(set(thresholds)))
    if not values or any(math.isnan(lam) for lam in values):
        raise ValueError(f"thresholds must be numbers, at least one; got {list(values)}")
    return values


def _first_step(
    reference: Trajectory, solver: Solver, reuse: Reuse, thresholds: tuple[float, ...]
) -> _Branch:
    x, v = reference.latents[0], reference.outputs[0]
    return _Branch(thresholds, (0,), 1, solver.step(v, 0, x), Cache.of(v, x, reuse=reuse), solver)


def _next_step(branch: _Branch, v: Tensor, truth: Cache) -> Iterator[_Branch]:
    """Yield the branch one step on, or two where its thresholds part."""
    k, x = branch.step, branch.sample
    fresh = Cache.of(v, x, reuse=truth.kind)
    error = relative_l1(branch.cache.feature, fresh.feature, reference=truth.feature)
    reusing = tuple(lam for lam in branch.thresholds if error < lam)
    computing = tuple(lam for lam in branch.thresholds if not error < lam)
    run = branch.solver
    if reusing:
        own = copy.deepcopy(run) if computing else run
        x_next = own.step(branch.cache.reuse(x), k, x)
        yield _Branch(reusing, branch.compute_steps, k + 1, x_next, branch.cache, own)
    if computing:
        steps = (*branch.compute_steps, k)
        yield _Branch(computing, steps, k + 1, run.step(v, k, x), fresh, run)


def search_profile(l1: Tensor, norm: Tensor, *, threshold: float) -> tuple[int, ...]:
    """Algorithm 2 without the network: every output is taken to be the reference run's.

    Args:
        l1: L1 distance of the residuals (or outputs) of any two steps, shape (P, T, T).
        norm: L1 norm of each step's residual (or output), shape (P, T).
        threshold: lambda.

    Example:
        >>> import torch
        >>> position = torch.tensor([0.0, 1.0, 3.0, 4.0, 9.0])
        >>> l1 = (position[:, None] - position).abs()[None]
        >>> search_profile(l1, torch.ones(1, 5), threshold=1.5)
        (0, 2, 4)
    """
    steps, _ = _walk_profile(_relative(l1, norm), threshold)
    return steps


def sweep_profile(l1: Tensor, norm: Tensor) -> dict[float, tuple[int, ...]]:
    """Every schedule that ``search_profile`` can return, by the smallest threshold that gives it.

    Decisions change at finitely many thresholds, so the sweep is complete. The number of computed
    steps need not fall with every threshold: a skipped refresh may cost two later ones.

    Example:
        >>> import torch
        >>> position = torch.tensor([0.0, 1.0, 3.0, 4.0, 9.0])
        >>> l1 = (position[:, None] - position).abs()[None]
        >>> for threshold, steps in sweep_profile(l1, torch.ones(1, 5)).items():
        ...     print(round(threshold, 3), steps)
        0.0 (0, 1, 2, 3, 4)
        1.0 (0, 2, 4)
        3.0 (0, 3, 4)
        4.0 (0, 4)
    """
    D = _relative(l1, norm)
    schedules: dict[float, tuple[int, ...]] = {}
    lam, change = 0.0, 0.0
    while change < math.inf:
        schedules[lam], change = _walk_profile(D, lam)
        lam = math.nextafter(change, math.inf)  # reuse means strictly below lambda
    return schedules


def _relative(l1: Tensor, norm: Tensor) -> list[list[float]]:
    D: list[list[float]] = safe_ratio(l1.double().sum(0), norm.double().sum(0)).tolist()
    return D


def _walk_profile(D: list[list[float]], lam: float) -> tuple[tuple[int, ...], float]:
    """Return the schedule, and the smallest distance at which a step was computed."""
    last = len(D) - 1
    steps, change = [0], math.inf
    for k in range(1, last):
        error = D[steps[-1]][k]
        if not error < lam:
            steps.append(k)
            change = min(change, error)
    return (*steps, last) if last else (0,), change


def pick_schedule(
    schedules: Mapping[float, tuple[int, ...]], budget: int
) -> tuple[float, tuple[int, ...]]:
    """The threshold and schedule with the most computed steps within ``budget``.

    Among equals the smallest threshold wins. Feed it ``sweep_profile`` for "the schedule of n
    steps", or the answer of ``search_thresholds``.

    Example:
        >>> pick_schedule({0.1: (0, 1, 2, 3), 0.2: (0, 2, 3), 0.3: (0, 3)}, 3)
        (0.2, (0, 2, 3))
    """
    within = [(-len(steps), lam) for lam, steps in schedules.items() if len(steps) <= budget]
    if not within:
        raise ValueError(f"no schedule computes at most {budget} steps; try larger thresholds")
    _, lam = min(within)
    return lam, schedules[lam]
