"""The frontier: for every number of computed steps the best schedule, its plan, its expected error.

Local search over schedules, all budgets side by side, on the linear algebra of ``solve``; then the
strength of the regularisation by leaving prompts out. Never calls the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.core.plan import TrajectoryPlan, check_compute_steps
from ertacache.core.search import search_schedules, spread_schedule
from ertacache.core.solve import Fit, System, fit_plans, schedule_mask

__all__ = [
    "RIDGES",
    "Frontier",
    "FrontierPoint",
    "choose_ridges",
    "leave_out_errors",
    "solve_frontier",
]

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e6)
"""Candidate strengths of the regularisation; the last is plain reuse."""

LONE_RIDGE = 1e-2  # with a single prompt nothing can be left out
FOLDS = 8


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """The best plan found for one number of computed steps.

    Attributes:
        plan: schedule and coefficients.
        fit: how its coefficients were fitted; the ridge is the chosen one.
        predicted_error: expected root mean square distance of the final latent to the reference
            one, on prompts left out of the fit.
    """

    plan: TrajectoryPlan
    fit: Fit
    predicted_error: float

    @property
    def computed(self) -> int:
        """Number of computed steps."""
        return len(self.plan.compute_steps)


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points for ascending numbers of computed steps."""

    points: tuple[FrontierPoint, ...]

    def select(
        self,
        *,
        speedup: float | None = None,
        compute_steps: int | None = None,
        max_error: float | None = None,
    ) -> FrontierPoint:
        """The point for one wish: a speed-up, a number of computed steps or a predicted error.

        Args:
            speedup: at least this many times fewer computed steps than steps.
            compute_steps: exactly this many.
            max_error: the fewest computed steps that are expected to stay within it.
        """
        if sum(wish is not None for wish in (speedup, compute_steps, max_error)) != 1:
            raise ValueError("give exactly one of speedup, compute_steps and max_error")
        if max_error is not None:
            return self._within(max_error)
        num_steps = self.points[0].plan.num_steps
        if speedup is not None:
            if not 1 <= speedup <= num_steps:
                raise ValueError(f"speedup must be between 1 and {num_steps}, got {speedup}")
            compute_steps = math.floor(num_steps / speedup + 1e-9)
        for point in self.points:
            if point.computed == compute_steps:
                return point
        low, high = self.points[0].computed, self.points[-1].computed
        raise ValueError(
            f"no plan with {compute_steps} computed steps: the frontier has {low} to {high}"
        )

    def _within(self, max_error: float) -> FrontierPoint:
        for point in self.points:
            if point.predicted_error <= max_error:
                return point
        best = min(point.predicted_error for point in self.points)
        raise ValueError(f"no plan is expected to stay within {max_error:g}; the best is {best:g}")


def solve_frontier(
    statistics: RunStatistics,
    nominal: Tensor,
    *,
    budgets: Iterable[int] | None = None,
    fit: Fit | None = None,
    pinned: Iterable[int] = (),
    starts: Sequence[Sequence[int]] = (),
) -> Frontier:
    """Find the best plan for every number of computed steps.

    Args:
        statistics: the profile.
        nominal: the scheduler's first-order update, shape (T, 2).
        budgets: numbers of computed steps; all from two to T by default.
        fit: how coefficients are fitted during the search.
        pinned: steps that must be computed (step 0 always is).
        starts: schedules to start from besides the uniform ones; other budgets are not used.
    """
    T = statistics.num_steps
    fit = Fit() if fit is None else fit
    pinned = sorted({0, *pinned})
    check_compute_steps(pinned, T)
    wanted = range(max(2, len(pinned)), T + 1) if budgets is None else sorted(set(budgets))
    if wanted and not len(pinned) <= wanted[0] <= wanted[-1] <= T:
        raise ValueError(f"budgets must lie between {len(pinned)} and {T}, got {list(wanted)}")
    system = System(statistics.inner.mean(0, keepdim=True), nominal, fit)
    found = search_schedules(system, wanted, pinned=pinned, starts=starts)
    schedules = [*found, *(spread_schedule(T, n, pinned) for n in wanted)]
    errors, ridges = choose_ridges(statistics, nominal, schedules=schedules, fit=fit)
    n = len(wanted)
    best = [i if errors[i] <= errors[i + n] else i + n for i in range(n)]
    points: list[FrontierPoint] = []
    for ridge in sorted({ridges[i] for i in best}):
        rows = [i for i in best if ridges[i] == ridge]
        chosen = replace(fit, ridge=ridge)
        plans = fit_plans(statistics, nominal, schedules=[schedules[i] for i in rows], fit=chosen)
        points += [FrontierPoint(p, chosen, errors[i]) for i, p in zip(rows, plans, strict=True)]
    return Frontier(tuple(sorted(points, key=lambda point: point.computed)))


def choose_ridges(
    statistics: RunStatistics,
    nominal: Tensor,
    *,
    schedules: Sequence[Sequence[int]],
    fit: Fit,
    ridges: Sequence[float] = RIDGES,
) -> tuple[list[float], list[float]]:
    """For each schedule the strength that serves left-out prompts best, and its error there.

    Args:
        statistics: the profile.
        nominal: the scheduler's first-order update, shape (T, 2).
        schedules: computed steps of each schedule.
        fit: how coefficients are fitted; its ridge is not used.
        ridges: the strengths to choose from.

    Returns:
        Expected final errors and chosen strengths, one each per schedule.
    """
    if statistics.num_prompts == 1:
        ridges = (LONE_RIDGE,)
    errors = torch.stack(
        [
            leave_out_errors(
                statistics, nominal, schedules=schedules, fit=replace(fit, ridge=ridge)
            )
            for ridge in ridges
        ]
    )
    best = errors.min(0)
    return best.values.tolist(), [ridges[i] for i in best.indices.tolist()]


def leave_out_errors(
    statistics: RunStatistics, nominal: Tensor, *, schedules: Sequence[Sequence[int]], fit: Fit
) -> Tensor:
    """Expected final error of each schedule on prompts left out of the fit, shape (S,).

    Prompts are left out one by one, or in eight groups when there are more. A single prompt cannot
    be left out: its error is that of the fit itself.
    """
    P = statistics.num_prompts
    folds = min(P, FOLDS)
    group = torch.arange(P) % folds
    size = torch.bincount(group).double()[:, None, None]
    held = torch.zeros(folds, *statistics.inner.shape[1:], dtype=torch.float64)
    held.index_add_(0, group, statistics.inner)
    rest = (held.sum(0) - held) / (P - size) if P > 1 else held
    mask = schedule_mask(schedules, statistics.num_steps).repeat_interleave(folds, 0)
    which = torch.arange(folds).repeat(len(schedules))
    z = System(rest, nominal, fit).simulate(mask, which).coefficients
    errors = System(held / size, nominal, fit).simulate(mask, which, z).errors[:, -1]
    share = size.flatten() / P
    return (errors.view(-1, folds).square() * share).sum(1).sqrt()
