"""The frontier: for every number of computed steps the best compute schedule and its plan.

A local search over compute schedules, all budgets side by side, on the simulation of ``simulate``;
then the strength of the ridge, by leaving prompts out. The network is never evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.core.plans import TrajectoryPlan, check_compute_steps, uniform_schedule
from ertacache.core.simulate import Fit, Simulation, System, fit_plans, schedule_mask

__all__ = [
    "RIDGES",
    "Frontier",
    "FrontierPoint",
    "choose_ridges",
    "leave_out_errors",
    "search_schedules",
    "solve_frontier",
    "spread_schedule",
]

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e6)
"""Candidate ridges; the last one is plain reuse."""

LONE_RIDGE = 1e-2  # with a single prompt nothing can be left out
FOLDS = 8

REACH = 2  # how far a computed step moves in one round
ROUNDS = 12
EXCHANGES = 2
GAIN = 0.999  # smaller improvements are rounding, not progress


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

    def point(self, compute_steps: int) -> FrontierPoint:
        """The point with exactly this many computed steps."""
        for point in self.points:
            if point.computed == compute_steps:
                return point
        low, high = self.points[0].computed, self.points[-1].computed
        raise ValueError(
            f"no plan with {compute_steps} computed steps: the frontier has {low} to {high}"
        )

    def within(self, max_error: float) -> FrontierPoint:
        """The point with the fewest computed steps whose predicted error is within a limit."""
        for point in self.points:
            if point.predicted_error <= max_error:
                return point
        best = min(point.predicted_error for point in self.points)
        raise ValueError(
            f"no plan has a predicted error within {max_error:g}; the lowest is {best:g}"
        )


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
    system = System(statistics.gram.mean(), nominal, fit)
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
    """For each schedule the ridge with the lowest error on left-out prompts, and its error there.

    Args:
        statistics: the profile.
        nominal: the scheduler's first-order update, shape (T, 2).
        schedules: computed steps of each schedule.
        fit: how coefficients are fitted; its ridge is not used.
        ridges: the values to choose from.

    Returns:
        Expected final errors and chosen ridges, one each per schedule.
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
    folds = min(statistics.num_prompts, FOLDS)
    held, rest, size = statistics.gram.folds(folds)
    mask = schedule_mask(schedules, statistics.num_steps).repeat_interleave(folds, 0)
    which = torch.arange(folds).repeat(len(schedules))
    z = System(rest, nominal, fit).simulate(mask, which).coefficients
    errors = System(held, nominal, fit).simulate(mask, which, z).errors[:, -1]
    share = size / statistics.num_prompts
    return (errors.view(-1, folds).square() * share).sum(1).sqrt()


class _Candidates(NamedTuple):
    """Schedules that might replace others.

    Attributes:
        base: the run whose beginning a candidate shares, (B,).
        receiver: the run that it would replace, (B,).
        mask: its computed steps, (B, T).
    """

    base: Tensor
    receiver: Tensor
    mask: Tensor


def spread_schedule(num_steps: int, budget: int, pinned: Iterable[int]) -> tuple[int, ...]:
    """The uniform schedule, moved as little as needed to hold the pinned steps.

    Example:
        >>> spread_schedule(10, 4, pinned={0, 5})
        (0, 3, 5, 9)
    """
    steps, fixed = set(uniform_schedule(num_steps, budget)), set(pinned)
    for pin in sorted(fixed - steps):
        steps.remove(min(steps - fixed, key=lambda k: (abs(k - pin), -k)))
        steps.add(pin)
    return tuple(sorted(steps))


def search_schedules(
    system: System,
    budgets: Sequence[int],
    *,
    pinned: Iterable[int] = (),
    starts: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """The best schedule found for each budget.

    Starts from the uniform schedules and from those of the caller. Single steps move while that
    helps; then neighbouring budgets lend each other their schedules, one step more or less.

    Args:
        system: one Gram matrix and how coefficients are fitted on it.
        budgets: numbers of computed steps, ascending.
        pinned: steps that are always computed, besides step 0.
        starts: further schedules to start from; those of other budgets are not used.
    """
    T = system.num_steps
    keep = torch.zeros(T, dtype=torch.bool)
    keep[[0, *pinned]] = True
    fixed = {0, *pinned}
    runs = [spread_schedule(T, n, fixed) for n in budgets]
    given = (sorted(fixed.union(check_compute_steps(start, T))) for start in starts)
    runs += [tuple(steps) for steps in given if len(steps) in budgets]
    mask = schedule_mask(runs, T)
    errors = _simulate(system, mask).errors[:, -1]
    _move_steps(system, mask, errors, keep=keep)
    best = [_best_run(mask, errors, n) for n in budgets]
    mask, errors = mask[best], errors[best]
    for _ in range(EXCHANGES):
        borrowed = _borrow_steps(mask, keep)
        if not _replace(system, mask, errors, candidates=borrowed).any():
            break
        _move_steps(system, mask, errors, keep=keep)
    return [tuple(row.nonzero()[:, 0].tolist()) for row in mask]


def _best_run(mask: Tensor, errors: Tensor, budget: int) -> int:
    return int(errors.where(mask.sum(1) == budget, torch.inf).argmin())


def _move_steps(system: System, mask: Tensor, errors: Tensor, *, keep: Tensor) -> None:
    """Move single steps of every run, in place, until that no longer helps."""
    active = torch.arange(len(mask))
    for _ in range(ROUNDS):
        runs, found = mask[active], errors[active]
        better = _replace(system, runs, found, candidates=_moves(runs, keep))
        mask[active], errors[active] = runs, found
        active = active[better]
        if not len(active):
            break


def _moves(mask: Tensor, keep: Tensor) -> _Candidates:
    """Every computed step of every run, moved by up to ``REACH`` to a free place."""
    run, step = (mask & ~keep).nonzero(as_tuple=True)
    shifts = torch.tensor([d for d in range(-REACH, REACH + 1) if d])
    run, step = run.repeat_interleave(len(shifts)), step.repeat_interleave(len(shifts))
    place = step + shifts.repeat(len(step) // len(shifts))
    free = (place >= 0) & (place < mask.shape[1])
    free &= ~mask[run, place.clamp(0, mask.shape[1] - 1)]
    run, step, place = run[free], step[free], place[free]
    moved = mask[run]
    rows = torch.arange(len(moved))
    moved[rows, step], moved[rows, place] = False, True
    return _Candidates(run, run, moved)


def _borrow_steps(mask: Tensor, keep: Tensor) -> _Candidates:
    """Every run with one step more or less, for the neighbouring budget with that many steps."""
    run, step = (~keep).expand_as(mask).nonzero(as_tuple=True)
    changed = mask[run]
    rows = torch.arange(len(changed))
    changed[rows, step] ^= True
    receiver = torch.where(changed[rows, step], run + 1, run - 1)
    inside = (receiver >= 0) & (receiver < len(mask))
    inside &= mask.sum(1)[receiver.clamp(0, len(mask) - 1)] == changed.sum(1)
    return _Candidates(run[inside], receiver[inside], changed[inside])


def _replace(system: System, mask: Tensor, errors: Tensor, *, candidates: _Candidates) -> Tensor:
    """Replace runs, in place, by their best candidate if it is better; return which were."""
    found = _simulate_variants(system, mask, candidates)
    lowest = errors.scatter_reduce(0, candidates.receiver, found, "amin")
    better = lowest < GAIN * errors
    winners = (found == lowest[candidates.receiver]) & better[candidates.receiver]
    mask[candidates.receiver[winners]] = candidates.mask[winners]
    errors[better] = lowest[better]
    return better


def _simulate(system: System, mask: Tensor) -> Simulation:
    return system.simulate(mask, torch.zeros(len(mask), dtype=torch.long))


def _simulate_variants(system: System, mask: Tensor, candidates: _Candidates) -> Tensor:
    """Final errors (B,) of candidates, each simulated from where it leaves its base run.

    A candidate and its base share all steps before the first one in which they differ, so the
    candidate starts there from the base's state. Sorted by that step, the candidates that have
    started are always the first rows of the batch, which grows as the steps go on.
    """
    leaves = (candidates.mask != mask[candidates.base]).int().argmax(1)
    order = leaves.argsort(stable=True)
    base, computed = candidates.base[order], candidates.mask[order]
    joined = torch.searchsorted(leaves[order], torch.arange(system.num_steps), right=True)
    states = _simulate(system, mask).states
    running = states[0].rows(base[:0])
    for k, now in enumerate(joined.tolist()):
        before = len(running.error)
        if now > before:
            running = running.stack(states[k].rows(base[before:now]))
        which = torch.zeros(now, dtype=torch.long)
        running, _ = system.take(running, k, computed=computed[:now, k], which=which)
    return torch.empty_like(running.error).scatter_(0, order, running.error.sqrt())
