"""The frontier: for every number of computed steps the best compute schedule and its plan.

A local search over compute schedules, all budgets side by side, on the simulation of ``simulate``.
The network is never evaluated. How a budget is fitted was measured (``MeasuredFit``), or is chosen
by leaving prompts out of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ertacache.core.gram import Gram
from ertacache.core.plans import TrajectoryPlan, check_compute_steps, uniform_schedule
from ertacache.core.simulate import Fit, Simulation, System, fit_plans, schedule_mask

__all__ = [
    "PLAIN",
    "RIDGES",
    "Frontier",
    "FrontierPoint",
    "KnownSchedule",
    "MeasuredFit",
    "choose_fits",
    "leave_out_errors",
    "map_schedule",
    "search_schedules",
    "solve_frontier",
    "spread_schedule",
]

PLAIN = 1e6
"""A ridge so strong that a plan is plain reuse."""

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, PLAIN)  # candidates, if none was measured
LONE_RIDGE = 1e-2  # with a single prompt nothing can be left out
FOLDS = 8

REACH = 2  # how far a computed step moves in one round
ROUNDS = 12
EXCHANGES = 2
LENDERS = 3  # budgets beyond those that a fit is for, searched along
GAIN = 0.999  # smaller improvements are rounding, not progress
FEW = 512  # runs that are simulated in about the time of one


@dataclass(frozen=True)
class MeasuredFit:
    """How plans with about so many computed steps are fitted best, measured on the network.

    Attributes:
        computed: number of computed steps of the plans that were run; scaled to a run of another
            number of steps, it need not be whole.
        fit: the best of the fits tried.
        error_ratio: error of the final latent that was measured, over the predicted one.
        uniform: whether uniform compute schedules came closer than searched ones.
    """

    computed: float
    fit: Fit
    error_ratio: float
    uniform: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.computed < math.inf:
            raise ValueError(f"computed must be positive, got {self.computed}")
        if not 0 < self.error_ratio < math.inf:
            raise ValueError(f"error_ratio must be positive, got {self.error_ratio}")


def choose_fits(measured: Sequence[MeasuredFit], budgets: Iterable[int]) -> list[MeasuredFit]:
    """For every budget the measured fit nearest to it, with the error ratio interpolated there.

    Nearest and interpolated in the logarithm of the number of computed steps; beyond the ends, the
    ratio of the end.

    Args:
        measured: at least one, ascending.
        budgets: numbers of computed steps.

    Example:
        >>> known = [MeasuredFit(5, Fit(ridge=0.1), 4.0), MeasuredFit(20, Fit(ridge=0.01), 1.0)]
        >>> [(each.fit.ridge, round(each.error_ratio, 3)) for each in choose_fits(known, [5, 8])]
        [(0.1, 4.0), (0.1, 2.5)]
    """
    places = [math.log(each.computed) for each in measured]
    logs = [math.log(each.error_ratio) for each in measured]
    found = []
    for budget in budgets:
        at = min(max(math.log(budget), places[0]), places[-1])
        nearest = min(zip(places, measured, strict=True), key=lambda pair: abs(pair[0] - at))[1]
        i = max(j for j, place in enumerate(places) if place <= at)
        ratio = logs[i]
        if i + 1 < len(places):
            share = (at - places[i]) / (places[i + 1] - places[i])
            ratio += share * (logs[i + 1] - logs[i])
        found.append(replace(nearest, computed=budget, error_ratio=math.exp(ratio)))
    return found


@dataclass(frozen=True)
class KnownSchedule:
    """A compute schedule that was found for its number of computed steps.

    Attributes:
        compute_steps: the computed steps.
        predicted_error: as that of ``FrontierPoint``.
    """

    compute_steps: tuple[int, ...]
    predicted_error: float


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """The best plan found for one number of computed steps.

    Attributes:
        plan: schedule and coefficients.
        fit: how its coefficients were fitted.
        predicted_error: expected root mean square distance of the final latent to the reference
            one, on prompts left out of the fit; never above that of fewer computed steps.
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

    @property
    def known(self) -> tuple[KnownSchedule, ...]:
        """The compute schedules without their coefficients, as a file keeps them."""
        return tuple(KnownSchedule(p.plan.compute_steps, p.predicted_error) for p in self.points)

    def point(self, compute_steps: int) -> FrontierPoint:
        """The point with exactly this many computed steps."""
        for point in self.points:
            if point.computed == compute_steps:
                return point
        low, high = self.points[0].computed, self.points[-1].computed
        raise ValueError(
            f"no plan with {compute_steps} computed steps: the frontier has {low} to {high}"
        )


def solve_frontier(
    gram: Gram,
    nominal: Tensor,
    *,
    budgets: Iterable[int] | None = None,
    measured: Sequence[MeasuredFit] = (),
    pinned: Iterable[int] = (),
    starts: Sequence[Sequence[int]] = (),
    rounds: int = ROUNDS,
) -> Frontier:
    """Find the best plan for every number of computed steps.

    Args:
        gram: the profile, one matrix per prompt.
        nominal: the scheduler's first-order update, shape (T, 2).
        budgets: numbers of computed steps; all from two to T by default.
        measured: fits that were measured, ascending; without any, ridges are chosen by leaving
            prompts out.
        pinned: steps that must be computed (step 0 always is).
        starts: schedules to start from besides the uniform ones; other budgets are not used.
        rounds: how often the steps of a schedule are moved, at most.
    """
    T = gram.num_steps
    pinned = sorted({0, *pinned})
    check_compute_steps(pinned, T)
    wanted = range(max(2, len(pinned)), T + 1) if budgets is None else sorted(set(budgets))
    if wanted and not len(pinned) <= wanted[0] <= wanted[-1] <= T:
        raise ValueError(f"budgets must lie between {len(pinned)} and {T}, got {list(wanted)}")
    search = _Search(gram, nominal, frozenset(pinned), starts, rounds)
    chosen = search.measured(wanted, measured) if measured else search.left_out(wanted)
    plans: dict[tuple[int, ...], TrajectoryPlan] = {}
    for fit in dict.fromkeys(choice.fit for choice in chosen):
        schedules = [choice.steps for choice in chosen if choice.fit == fit]
        plans |= zip(schedules, fit_plans(gram, nominal, schedules=schedules, fit=fit), strict=True)
    # One more computed step cannot be worse.
    errors = accumulate((choice.error for choice in chosen), min)
    return Frontier(
        tuple(
            FrontierPoint(plans[choice.steps], choice.fit, error)
            for choice, error in zip(chosen, errors, strict=True)
        )
    )


class _Choice(NamedTuple):
    """A compute schedule, how it is fitted, and its predicted error."""

    steps: tuple[int, ...]
    fit: Fit
    error: float


@dataclass(frozen=True, eq=False)
class _Search:
    """What a search for several budgets shares; the fields are arguments of ``solve_frontier``."""

    gram: Gram
    nominal: Tensor
    pinned: frozenset[int]
    starts: Sequence[Sequence[int]]
    rounds: int

    def schedules(self, budgets: Sequence[int], fit: Fit) -> list[tuple[int, ...]]:
        """The best schedule found for each budget."""
        system = System(self.gram.mean(), self.nominal, fit)
        return search_schedules(
            system, budgets, pinned=self.pinned, starts=self.starts, rounds=self.rounds
        )

    def uniform(self, budgets: Sequence[int]) -> list[tuple[int, ...]]:
        """The uniform schedule of each budget."""
        return [spread_schedule(self.gram.num_steps, n, self.pinned) for n in budgets]

    def errors(self, schedules: Sequence[tuple[int, ...]], fit: Fit) -> list[float]:
        """Their expected errors on prompts left out."""
        found: list[float] = leave_out_errors(
            self.gram, self.nominal, schedules=schedules, fit=fit
        ).tolist()
        return found

    def left_out(self, budgets: Sequence[int]) -> list[_Choice]:
        """The ridge of each budget by the lowest error on prompts left out of the simulation.

        Of two schedules: the one found with the weakest ridge, and the uniform one.
        """
        fit = Fit() if len(self.gram.products) > 1 else Fit(ridge=LONE_RIDGE)
        ridges = RIDGES if len(self.gram.products) > 1 else (LONE_RIDGE,)
        best: list[_Choice | None] = [None] * len(budgets)
        for schedules in (self.schedules(budgets, fit), self.uniform(budgets)):
            for ridge in ridges:
                tried = replace(fit, ridge=ridge)
                for i, error in enumerate(self.errors(schedules, tried)):
                    known = best[i]
                    if known is None or error < known.error:
                        best[i] = _Choice(schedules[i], tried, error)
        return [choice for choice in best if choice is not None]

    def measured(self, budgets: Sequence[int], known: Sequence[MeasuredFit]) -> list[_Choice]:
        """Each budget with the fit measured for it, its error corrected by what was measured."""
        chosen = choose_fits(known, budgets)
        found: dict[int, _Choice] = {}
        for fit, uniform in dict.fromkeys((each.fit, each.uniform) for each in chosen):
            fitted = [
                i for i, each in enumerate(chosen) if (each.fit, each.uniform) == (fit, uniform)
            ]
            # Neighbouring budgets lend each other schedules.
            first = max(0, fitted[0] - LENDERS)
            near = budgets[first : fitted[-1] + 1 + LENDERS]
            schedules = self.uniform(near) if uniform else self.schedules(near, fit)
            errors = self.errors(schedules, fit)
            for i in fitted:
                error = errors[i - first] * chosen[i].error_ratio
                found[i] = _Choice(schedules[i - first], fit, error)
        return [found[i] for i in range(len(budgets))]


def leave_out_errors(
    gram: Gram, nominal: Tensor, *, schedules: Sequence[Sequence[int]], fit: Fit
) -> Tensor:
    """Expected final error of each schedule on prompts left out of the fit, shape (S,).

    Prompts are left out one by one, or in eight groups when there are more. A single prompt cannot
    be left out: its error is that of the fit itself.
    """
    P = len(gram.products)
    folds = min(P, FOLDS)
    held, rest, size = gram.folds(folds)
    mask = schedule_mask(schedules, gram.num_steps).repeat_interleave(folds, 0)
    which = torch.arange(folds).repeat(len(schedules))
    z = System(rest, nominal, fit).simulate(mask, which).coefficients
    errors = System(held, nominal, fit).simulate(mask, which, z).errors[:, -1]
    return (errors.view(-1, folds).square() * (size / P)).sum(1).sqrt()


def map_schedule(
    steps: Sequence[int], sigmas: Tensor, onto: Tensor, *, budget: int, pinned: Collection[int]
) -> tuple[int, ...]:
    """A compute schedule on other sigmas: the same noise levels, as nearly as there are steps.

    Steps that are missing are added in the middle of the widest gaps, and those that cost the
    least are left out.

    Args:
        steps: the computed steps.
        sigmas: their sigma schedule, descending.
        onto: the other sigma schedule.
        budget: number of computed steps on it.
        pinned: steps there that must be computed; step 0 always is.

    Example:
        >>> ten, five = torch.linspace(1, 0, 11), torch.linspace(1, 0, 6)
        >>> map_schedule((0, 2, 4, 8), ten, five, budget=3, pinned=())
        (0, 2, 4)
    """
    levels = sigmas[list(steps)]
    inside = levels[levels <= onto[0]]
    nearest = (onto[:-1, None] - inside).abs().argmin(0)
    fixed = {0, *pinned}
    return _resize(sorted(fixed.union(nearest.tolist())), budget, len(onto) - 1, pinned=fixed)


def _resize(
    steps: Sequence[int], budget: int, num_steps: int, *, pinned: Collection[int]
) -> tuple[int, ...]:
    """Add steps in the middle of the widest gaps, or leave out those that cost the least.

    Example:
        >>> _resize([0, 1, 2, 6], 5, 10, pinned={0}), _resize([0, 1, 2, 6], 3, 10, pinned={0})
        ((0, 1, 2, 4, 6), (0, 2, 6))
        >>> _resize([0, 1, 2, 6], 3, 10, pinned={0, 1})
        (0, 1, 6)
    """
    chosen = list(steps)
    while len(chosen) < budget:
        ends = [*chosen[1:], num_steps]
        gap, at = max((end - at, -at) for at, end in zip(chosen, ends, strict=True))
        chosen = sorted([*chosen, gap // 2 - at])
    while len(chosen) > budget:
        around = zip(chosen, [*chosen[2:], num_steps], chosen[1:], strict=False)
        free = ((after - before, step) for before, after, step in around if step not in pinned)
        chosen.remove(min(free)[1])
    return tuple(chosen)


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
    rounds: int = ROUNDS,
) -> list[tuple[int, ...]]:
    """The best schedule found for each budget.

    Starts from the uniform schedules and from those of the caller. Single steps move while that
    helps; then neighbouring budgets lend each other their schedules, one step more or less.

    Args:
        system: one Gram matrix and how coefficients are fitted on it.
        budgets: numbers of computed steps, ascending.
        pinned: steps that are always computed, besides step 0.
        starts: further schedules to start from; those of other budgets are not used.
        rounds: how often the steps of a schedule are moved, at most.
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
    if rounds == ROUNDS:  # a search in haste moves only the best start
        _move_steps(system, mask, errors, keep=keep, rounds=rounds)
    best = [_best_run(mask, errors, n) for n in budgets]
    mask, errors = mask[best], errors[best]
    _move_steps(system, mask, errors, keep=keep, rounds=rounds)
    for _ in range(EXCHANGES):
        borrowed = _borrow_steps(mask, keep)
        if not _replace(system, mask, errors, candidates=borrowed).any():
            break
        _move_steps(system, mask, errors, keep=keep, rounds=rounds)
    return [tuple(row.nonzero()[:, 0].tolist()) for row in mask]


def _best_run(mask: Tensor, errors: Tensor, budget: int) -> int:
    return int(errors.where(mask.sum(1) == budget, torch.inf).argmin())


def _move_steps(system: System, mask: Tensor, errors: Tensor, *, keep: Tensor, rounds: int) -> None:
    """Move single steps of every run, in place, until that no longer helps."""
    active = torch.arange(len(mask))
    for done in range(rounds):
        runs, found = mask[active], errors[active]
        # In haste a step may first go anywhere: there are no neighbouring budgets to learn from.
        reach = mask.shape[1] if rounds < ROUNDS and done == 0 else REACH
        better = _replace(system, runs, found, candidates=_moves(runs, keep, reach))
        mask[active], errors[active] = runs, found
        active = active[better]
        if not len(active):
            break


def _moves(mask: Tensor, keep: Tensor, reach: int) -> _Candidates:
    """Every computed step of every run, moved by up to ``reach`` to a free place."""
    run, step = (mask & ~keep).nonzero(as_tuple=True)
    shifts = torch.tensor([d for d in range(-reach, reach + 1) if d])
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
    if len(candidates.mask) <= FEW:  # nothing is gained by what they share
        return _simulate(system, candidates.mask).errors[:, -1]
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
