"""The frontier: for every number of computed steps the best compute schedule and its plan.

Schedules are searched, and their errors predicted, with one group; they are fitted with as many as
the fit has, and what was measured of it corrects the prediction. The network is never evaluated.
How a budget is fitted was measured (``MeasuredFit``), or is chosen by leaving prompts out of the
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ertacache.core.gram import Gram
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import TrajectoryPlan, check_compute_steps
from ertacache.core.search import ROUNDS, search_schedules, spread_schedule
from ertacache.core.simulate import Fit, System, fit_plans, schedule_mask

__all__ = [
    "PLAIN",
    "RIDGES",
    "Frontier",
    "FrontierPoint",
    "KnownSchedule",
    "MeasuredFit",
    "choose_fits",
    "leave_out_errors",
    "solve_frontier",
]

PLAIN = 1e6
"""A ridge so strong that a plan is plain reuse."""

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, PLAIN)  # candidates, if none was measured
LONE_RIDGE = 1e-2  # with a single prompt nothing can be left out
FOLDS = 8
HELD = 32  # prompts that are simulated on their own; with more of them, means. A multiple of FOLDS

LENDERS = 3  # budgets beyond those that a fit is for, searched along


ByGroup = Callable[[Groups], Gram]
"""The Gram matrices of a profile for some groups."""


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
        simulated_error: the same as simulated with one group, not corrected by anything.
    """

    plan: TrajectoryPlan
    fit: Fit
    predicted_error: float
    simulated_error: float

    @property
    def computed(self) -> int:
        """Number of computed steps."""
        return len(self.plan.compute_steps)


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points for ascending numbers of computed steps."""

    points: tuple[FrontierPoint, ...]

    @classmethod
    def of(cls, points: Iterable[FrontierPoint]) -> Frontier:
        """A frontier of points whose predicted errors may rise."""
        found = list(points)
        # One more computed step cannot be worse, and with all of them the run is the full run.
        errors = accumulate(
            (p.predicted_error if p.computed < p.plan.num_steps else 0.0 for p in found), min
        )
        return cls(
            tuple(replace(p, predicted_error=error) for p, error in zip(found, errors, strict=True))
        )

    @property
    def known(self) -> tuple[KnownSchedule, ...]:
        """The compute schedules without their coefficients, as a file keeps them."""
        return tuple(KnownSchedule(p.plan.compute_steps, p.predicted_error) for p in self.points)

    def corrected(
        self, measured: Sequence[MeasuredFit], points: Iterable[FrontierPoint] = ()
    ) -> Frontier:
        """The frontier with errors predicted by these error ratios, and some points replaced.

        Args:
            measured: the ratios, ascending by the number of computed steps.
            points: each replaces the one with as many computed steps.
        """
        others = {point.computed: point for point in points}
        found = [others.get(point.computed, point) for point in self.points]
        fits = choose_fits(measured, [point.computed for point in found])
        return Frontier.of(
            replace(point, predicted_error=point.simulated_error * known.error_ratio)
            for point, known in zip(found, fits, strict=True)
        )

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
    given: Sequence[tuple[int, ...]] = (),
    by_group: ByGroup | None = None,
    response: Tensor | None = None,
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
        given: schedules that are not searched, but fitted as they are; one for each budget.
        by_group: the profile by group, if a measured fit has groups.
        response: of the outputs to errors of the latent, shape (T,), if a measured fit needs it.
    """
    T = gram.num_steps
    pinned = sorted({0, *pinned})
    check_compute_steps(pinned, T)
    wanted = range(max(2, len(pinned)), T + 1) if budgets is None else sorted(set(budgets))
    if wanted and not len(pinned) <= wanted[0] <= wanted[-1] <= T:
        raise ValueError(f"budgets must lie between {len(pinned)} and {T}, got {list(wanted)}")
    search = _Search(
        gram,
        nominal,
        frozenset(pinned),
        starts,
        rounds,
        {len(steps): steps for steps in given},
        by_group,
        response,
    )
    chosen = search.measured(wanted, measured) if measured else search.left_out(wanted)
    plans: dict[tuple[int, ...], TrajectoryPlan] = {}
    for fit in dict.fromkeys(choice.fit for choice in chosen):
        schedules = [choice.steps for choice in chosen if choice.fit == fit]
        found = fit_plans(
            search.gram_of(fit), nominal, schedules=schedules, fit=fit, response=response
        )
        plans |= zip(schedules, found, strict=True)
    return Frontier.of(
        FrontierPoint(plans[choice.steps], choice.fit, choice.error, choice.simulated)
        for choice in chosen
    )


class _Choice(NamedTuple):
    """A compute schedule, how it is fitted, its simulated error and the predicted one."""

    steps: tuple[int, ...]
    fit: Fit
    simulated: float
    error: float


@dataclass(frozen=True, eq=False)
class _Search:
    """What a search for several budgets shares; the fields are arguments of ``solve_frontier``."""

    gram: Gram
    nominal: Tensor
    pinned: frozenset[int]
    starts: Sequence[Sequence[int]]
    rounds: int
    given: Mapping[int, tuple[int, ...]]
    by_group: ByGroup | None
    response: Tensor | None

    def gram_of(self, fit: Fit) -> Gram:
        """The Gram matrices that coefficients are fitted on."""
        if fit.groups == ONE_GROUP:
            return self.gram
        if self.by_group is None:
            raise ValueError(f"a fit of {fit.groups} needs the profile by group")
        return self.by_group(fit.groups)

    def schedules(self, budgets: Sequence[int], fit: Fit) -> list[tuple[int, ...]]:
        """The best schedule found for each budget, or the one given."""
        if self.given:
            return [self.given[n] for n in budgets]
        one = replace(fit, groups=ONE_GROUP)
        system = System(self.gram.mean(), self.nominal, one, self.response)
        return search_schedules(
            system, budgets, pinned=self.pinned, starts=self.starts, rounds=self.rounds
        )

    def uniform(self, budgets: Sequence[int]) -> list[tuple[int, ...]]:
        """The uniform schedule of each budget, or the one given."""
        if self.given:
            return [self.given[n] for n in budgets]
        return [spread_schedule(self.gram.num_steps, n, self.pinned) for n in budgets]

    def errors(
        self, schedules: Sequence[tuple[int, ...]], fit: Fit, *, careful: bool = False
    ) -> list[float]:
        """Their expected errors on prompts left out."""
        found: list[float] = leave_out_errors(
            self.gram,
            self.nominal,
            schedules=schedules,
            fit=replace(fit, groups=ONE_GROUP),
            response=self.response,
            careful=careful,
        ).tolist()
        return found

    def left_out(self, budgets: Sequence[int]) -> list[_Choice]:
        """The ridge of each budget by the lowest error on prompts left out of the simulation.

        Of two schedules: the one found with the weakest ridge, and the uniform one.
        """
        fit = Fit() if self.gram.num_prompts > 1 else Fit(ridge=LONE_RIDGE)
        ridges = RIDGES if self.gram.num_prompts > 1 else (LONE_RIDGE,)
        best: list[_Choice | None] = [None] * len(budgets)
        for schedules in (self.schedules(budgets, fit), self.uniform(budgets)):
            for ridge in ridges:
                tried = replace(fit, ridge=ridge)
                for i, error in enumerate(self.errors(schedules, tried, careful=True)):
                    known = best[i]
                    if known is None or error < known.error:
                        best[i] = _Choice(schedules[i], tried, error, error)
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
                steps, error = schedules[i - first], errors[i - first]
                found[i] = _Choice(steps, fit, error, error * chosen[i].error_ratio)
        return [found[i] for i in range(len(budgets))]


def leave_out_errors(
    gram: Gram,
    nominal: Tensor,
    *,
    schedules: Sequence[Sequence[int]],
    fit: Fit,
    response: Tensor | None = None,
    careful: bool = False,
) -> Tensor:
    """Expected final error of each schedule on prompts left out of the fit, shape (S,).

    Prompts are left out one by one, or in eight groups when there are more. A single prompt cannot
    be left out: its error is that of the fit itself. Of their errors the geometric mean is taken,
    as of measured ones (``typical_distance``). Where nothing was measured that is too bold, because
    a few prompts may diverge: ``careful`` takes the root mean square.
    """
    folds, held = (min(gram.num_prompts, count) for count in (FOLDS, HELD))
    mask, S = schedule_mask(schedules, gram.num_steps), len(schedules)
    z = None
    if fit.ridge < PLAIN:  # plain reuse is the same whatever it is fitted on
        rest = System(gram.folds(folds)[1], nominal, fit, response)
        each = rest.simulate(mask.repeat_interleave(folds, 0), torch.arange(folds).repeat(S))
        by_fold = each.coefficients.view(S, folds, *each.coefficients.shape[1:])
        z = by_fold[:, torch.arange(held) % folds].flatten(0, 1)
    one = System(gram.folds(held)[0], nominal, fit, response)
    found = one.simulate(mask.repeat_interleave(held, 0), torch.arange(held).repeat(S), z)
    errors = found.errors[:, -1].view(S, held)
    if careful:
        return errors.square().mean(1).sqrt()
    return errors.clamp_min(torch.finfo(torch.float64).tiny).log().mean(1).exp()
