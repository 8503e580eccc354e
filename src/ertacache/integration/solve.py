"""Plans for any run from the profile in a policy: another schedule, another speed-up.

The profile is resampled to the schedule of the run, and one budget is solved on it. The search
begins with the compute schedules of the profile's frontier at the same noise levels, so that one
budget is as good as its point on a whole frontier. Evaluates no network and touches no pipeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ertacache.core.frontier import (
    PLAIN,
    Frontier,
    FrontierPoint,
    KnownSchedule,
    MeasuredFit,
    choose_fits,
    leave_out_errors,
    solve_frontier,
)
from ertacache.core.gram import Gram, Schedule, resample_response
from ertacache.core.groups import ONE_GROUP
from ertacache.core.paper import reuse_distances, sweep_profile
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.search import ROUNDS, map_schedule, spread_schedule
from ertacache.core.simulate import Fit, fit_plans
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile

__all__ = [
    "FrontierRow",
    "PlanSolver",
    "error_of",
    "guess_unit",
    "measured_unit",
    "predicted_psnr",
    "profile_frontier",
    "profile_of",
    "with_frontier",
]

Steps = tuple[int, ...]

LATER = Fit(ridge=0.1, order=1)
"""Of runs that begin later than the profiled ones, in data of the user's. Their outputs change more
than the profile shows, so that a searched schedule and a weak ridge trust it too far."""

QUICK = 5
"""Rounds of a search that begins with good schedules, so that a run starts in a moment."""

AROUND = 2  # budgets more and less that are searched along with one
NEIGHBOURS = 3  # schedules of the frontier that a search begins with, of each kind
PIXEL_SPREAD = 0.25  # standard deviation of images with values from 0 to 1, roughly
TINY = 1e-12  # an error below it is none


class FrontierRow(NamedTuple):
    """What is known of one number of computed steps on the profiled schedule.

    Attributes:
        compute_steps: the best compute schedule found; of the fitted plan, if there is one.
        error: distance of the final latent to the full run's, measured if it was.
        predicted_psnr: what that error makes of the result, in dB.
        measured_psnr: the same, measured; None if it was not.
    """

    compute_steps: Steps
    error: float
    predicted_psnr: float
    measured_psnr: float | None


class _Run(NamedTuple):
    """What plans for one schedule are solved from.

    Attributes:
        schedule: of the run.
        gram: of full runs on it.
        response: of the outputs to errors of the latent; None if it was not measured.
        careful: whether errors are root mean squares over prompts, because none was measured.
    """

    schedule: Schedule
    gram: Gram
    response: Tensor | None
    careful: bool

    def error(self, steps: Steps, fit: Fit) -> float:
        """Error of a compute schedule as simulated with one group."""
        return leave_out_errors(
            self.gram,
            self.schedule.nominal,
            schedules=[steps],
            fit=replace(fit, groups=ONE_GROUP),
            response=self.response,
            careful=self.careful,
        ).item()


class PlanSolver:
    """Solves plans from the profile of one policy, and keeps what several of them need.

    Args:
        policy: a policy with a profile.

    Raises:
        PolicyError: if it has none.
    """

    def __init__(self, policy: Policy) -> None:
        """Take the frontier of the policy; one that has none is searched when it is needed."""
        self.policy, self.profile = policy, profile_of(policy)
        self._known: Sequence[KnownSchedule] = policy.frontier
        self._unit = policy.unit_psnr

    @property
    def known(self) -> Sequence[KnownSchedule]:
        """The frontier on the profiled schedule."""
        if not self._known:
            self._known = profile_frontier(self.policy).known
        return self._known

    def psnr(self, error: float) -> float:
        """Predicted PSNR of a result whose latent has this error."""
        unit = guess_unit(self.profile) if self._unit is None else self._unit
        return predicted_psnr(error, unit)

    def budgets(self, schedule: Schedule) -> range:
        """Numbers of computed steps that a run can have."""
        return range(max(2, 1 + len(self.pinned(schedule) - {0})), schedule.num_steps + 1)

    def pinned(self, schedule: Schedule) -> set[int]:
        """Steps of a run that must be computed, because another network may take over there.

        The profile shows between which noise levels one does. Every step in between is computed,
        and the first one after.
        """
        own, found = self.profile.schedule.sigmas, {0}
        for expert in self.profile.expert_steps:
            below = (schedule.sigmas[:-1] <= own[expert] + 1e-9).nonzero().flatten().tolist()
            between = (schedule.sigmas[:-1] < own[expert - 1] - 1e-9) & (
                schedule.sigmas[:-1] > own[expert] + 1e-9
            )
            found.update(below[:1], between.nonzero().flatten().tolist())
        return found

    def solve(self, schedule: Schedule, budget: int) -> FittedPlan | None:
        """The plan of a run with so many computed steps; None if it is no better than plain reuse.

        Where it is simulated to be no better with the measured ridge, stronger ones are tried. On
        the profiled schedule trials have compared the two, if there were any. A run that begins
        later has a uniform compute schedule and coefficients near to a line through two outputs.
        """
        if self.begins_later(schedule):
            return self._uniform(schedule, budget, LATER)
        with torch.inference_mode():  # thousands of small operations: a fifth of the time
            run = self._run(schedule)
            point: FrontierPoint | None = self._point(run, budget)
            if point is not None and budget < schedule.num_steps:
                point = self._better_than_plain(run, point)
        if point is None:
            return None
        plan = replace(point.plan, coefficients=point.plan.coefficients.clone())
        return _fitted(replace(point, plan=plan), schedule)

    def searched(self, schedule: Schedule, budget: int) -> list[Steps]:
        """Compute schedules that are best under each model of the errors of outputs.

        They are noise, or, where it was measured, the response of the network. Under which of them
        a plan is solved was chosen in open loop; refitted, the other's schedule may be better.
        """
        if self.begins_later(schedule):
            return []
        budgets, found = self.budgets(schedule), list[Steps]()
        near = range(max(budgets[0], budget - AROUND), min(budgets[-1], budget + AROUND) + 1)
        for response in (False, True) if self.policy.response else (False,):
            fits = tuple(
                replace(known, fit=replace(known.fit, response=response), uniform=False)
                for known in self.policy.fits
            )
            solver = PlanSolver(replace(self.policy, fits=fits, frontier=()))
            with torch.inference_mode():
                point = solver._frontier(solver._run(schedule), near).point(budget)
            found.append(point.plan.compute_steps)
        return found

    def plain(self, schedule: Schedule, budget: int) -> FittedPlan:
        """Plain reuse on the uniform compute schedule, as a plan."""
        return self._uniform(schedule, budget, Fit(ridge=PLAIN))

    def begins_later(self, schedule: Schedule) -> bool:
        """Whether a run, unlike the profiled ones, begins after its first step: image to image."""
        return self.profile.schedule.begun and not schedule.begun

    def _uniform(self, schedule: Schedule, budget: int, fit: Fit) -> FittedPlan:
        run = self._run(schedule)
        steps = spread_schedule(schedule.num_steps, budget, self.pinned(schedule))
        plan, error = self._fit_plan(run, steps, fit), run.error(steps, fit)
        return _fitted(FrontierPoint(plan, fit, error, error), schedule)

    def curve(self, schedule: Schedule) -> dict[int, float]:
        """Predicted error by the number of computed steps, never rising.

        On the profiled schedule that of the frontier; elsewhere its compute schedules at the same
        noise levels, not searched again.
        """
        if self.profile.schedule.same_run(schedule):
            return {len(known.compute_steps): known.predicted_error for known in self.known}
        budgets = self.budgets(schedule)
        if self.begins_later(schedule):
            return self._later_curve(schedule, budgets)
        starts = [self._starts(schedule, n, count=1)[0] for n in budgets]
        found = self._frontier(self._run(schedule), budgets, starts=starts, rounds=0)
        return {point.computed: point.predicted_error for point in found.points}

    def _later_curve(self, schedule: Schedule, budgets: range) -> dict[int, float]:
        if not budgets:  # a single step is left
            return {}
        run, pinned, least = self._run(schedule), self.pinned(schedule), math.inf
        curve = {}
        for budget in budgets[:-1]:
            steps = spread_schedule(schedule.num_steps, budget, pinned)
            least = curve[budget] = min(least, run.error(steps, LATER))
        return curve | {budgets[-1]: 0.0}

    def rows(self) -> list[FrontierRow]:
        """The frontier, with what was measured of it, by ascending numbers of computed steps."""
        # The frontier is of trajectory plans; those of the paper's method are no points of it.
        plans = [p for p in self.policy.plans if p.method == "trajectory"]
        fitted = {len(p.compute_steps): p for p in plans if p.fits(self.profile.schedule)}
        found = []
        for known in self.known:
            plan = fitted.get(len(known.compute_steps))
            error, psnr = known.predicted_error, None
            if plan is not None and plan.measured_error is not None:
                error = plan.measured_error
            if plan is not None and plan.measured is not None:
                psnr = plan.measured.psnr
            steps = known.compute_steps if plan is None else plan.compute_steps
            predicted = self.psnr(error) if error > 0 else math.inf
            found.append(FrontierRow(steps, error, predicted, psnr))
        return found

    def order(self, schedule: Schedule, budget: int) -> int:
        """Order of the polynomial that plans of a budget are pulled towards."""
        fits = self.fits(schedule)
        return choose_fits(fits, [budget])[0].fit.order if fits else 0

    def response(self, schedule: Schedule) -> Tensor | None:
        """How outputs of a run respond to errors of the latent; None if it was not measured."""
        if not self.policy.response:
            return None
        measured = torch.tensor(self.policy.response, dtype=torch.float64)
        return resample_response(measured, self.profile.schedule, schedule)

    def _run(self, schedule: Schedule) -> _Run:
        gram, response = self.profile.run_grams(schedule), self.response(schedule)
        return _Run(schedule, gram, response, careful=not self.policy.fits)

    def _fit_plan(self, run: _Run, steps: Steps, fit: Fit) -> TrajectoryPlan:
        gram = run.gram
        if fit.groups != ONE_GROUP:
            gram = self.profile.gram(fit.groups, run.schedule)
        nominal, response = run.schedule.nominal, run.response
        (plan,) = fit_plans(gram, nominal, schedules=[steps], fit=fit, response=response)
        return plan

    def _point(self, run: _Run, budget: int) -> FrontierPoint:
        own = self.profile.schedule.same_run(run.schedule)
        known = [k for k in self.known if own and len(k.compute_steps) == budget]
        if known:  # its schedule was searched, and its error predicted by what was measured there
            found = self._frontier(run, [budget], given=[known[0].compute_steps]).points[0]
            return replace(found, predicted_error=known[0].predicted_error)
        starts = self._starts(run.schedule, budget, count=NEIGHBOURS)
        return self._frontier(run, [budget], starts=starts, rounds=QUICK).points[0]

    def _starts(self, schedule: Schedule, budget: int, *, count: int) -> list[tuple[int, ...]]:
        """Schedules of the frontier with about as many steps, or as large a share of them.

        Each is moved to the noise levels of the run and resized to the budget.
        """
        own, pinned = self.profile.schedule.sigmas, self.pinned(schedule)
        inside = (own <= schedule.sigmas[0] + 1e-9).tolist()
        sizes = {k: sum(inside[step] for step in k.compute_steps) for k in self.known}
        share = budget / schedule.num_steps * sum(inside[:-1])
        nearest: list[KnownSchedule] = []
        for size in (budget, share):
            distance = {k: abs(found - size) for k, found in sizes.items()}
            nearest += sorted(distance, key=distance.__getitem__)[:count]
        return [
            map_schedule(k.compute_steps, own, schedule.sigmas, budget=budget, pinned=pinned)
            for k in dict.fromkeys(nearest)
        ]

    def _frontier(
        self,
        run: _Run,
        budgets: Iterable[int],
        *,
        starts: Sequence[Steps] = (),
        rounds: int = ROUNDS,
        given: Sequence[Steps] = (),
    ) -> Frontier:
        return solve_frontier(
            run.gram,
            run.schedule.nominal,
            budgets=budgets,
            measured=self.fits(run.schedule),
            pinned=self.pinned(run.schedule),
            starts=starts,
            rounds=rounds,
            given=given,
            by_group=functools.partial(self.profile.gram, run=run.schedule),
            response=run.response,
        )

    def fits(self, schedule: Schedule) -> list[MeasuredFit]:
        """The measured fits, their numbers of computed steps scaled to a run of other steps.

        Computed steps of the same number are as far apart in noise; of the same share, as many
        steps are reused between them. Both matter, and the geometric mean of the two did well on
        calibration prompts: n of T' steps count as n sqrt(T / T') of T.
        """
        own, profiled = self.profile.schedule.sigmas, self.profile.num_steps
        inside = max(1, int((own[:-1] <= schedule.sigmas[0] + 1e-9).sum()))  # of a later start
        factor = inside / profiled * math.sqrt(schedule.num_steps / inside)
        return [replace(fit, computed=fit.computed * factor) for fit in known_fits(self.policy)]

    def _better_than_plain(self, run: _Run, point: FrontierPoint) -> FrontierPoint | None:
        """The point, with a ridge that is strong enough to beat plain reuse; None if none is.

        Both are simulated under the assumptions of the point's fit. What trials measured is not
        compared again: on the profiled schedule, no fit that they found; elsewhere, no plain
        polynomial.
        """
        fit, steps, error = point.fit, point.plan.compute_steps, point.simulated_error
        own = self.profile.schedule.same_run(run.schedule)
        if self.policy.fits and (own or fit.ridge >= PLAIN):
            return point
        uniform = spread_schedule(run.schedule.num_steps, len(steps), self.pinned(run.schedule))
        limit = run.error(uniform, replace(fit, ridge=PLAIN, order=0))
        while not error < limit:
            if fit.ridge >= PLAIN:
                return None
            fit = replace(fit, ridge=max(10 * fit.ridge, 1e-3))
            error = run.error(steps, fit)
        if fit == point.fit:
            return point
        fits = self.fits(run.schedule)
        ratio = choose_fits(fits, [len(steps)])[0].error_ratio if fits else 1.0
        return FrontierPoint(self._fit_plan(run, steps, fit), fit, error * ratio, error)


def _fitted(point: FrontierPoint, schedule: Schedule) -> FittedPlan:
    return FittedPlan(
        point.plan,
        schedule.sigmas,
        target=schedule.target,
        predicted_error=point.predicted_error,
    )


def profile_of(policy: Policy) -> Profile:
    """The profile of a policy; raise if it has none."""
    if policy.profile is None:
        raise PolicyError("the policy has no profile, so that nothing can be solved from it")
    return policy.profile


def known_fits(policy: Policy) -> list[MeasuredFit]:
    """The measured fits, with one group if the profile does not know the others."""
    if profile_of(policy).by_group is not None:
        return list(policy.fits)
    return [replace(each, fit=replace(each.fit, groups=ONE_GROUP)) for each in policy.fits]


def profile_frontier(
    policy: Policy, *, budgets: Iterable[int] | None = None, given: Sequence[Steps] = ()
) -> Frontier:
    """The frontier of a profile on its own schedule, with the fits measured for it.

    The search starts from the paper's compute schedules as well.

    Args:
        policy: a policy with a profile.
        budgets: numbers of computed steps; all by default.
        given: compute schedules that are fitted as they are, one for each budget.
    """
    profile = profile_of(policy)
    lambdas = sweep_profile(*reuse_distances(profile.statistics, "residual"))
    return solve_frontier(
        profile.run_grams(),
        profile.schedule.nominal,
        budgets=[len(steps) for steps in given] if given else budgets,
        measured=known_fits(policy),
        pinned=profile.expert_steps,
        starts=sorted(set(lambdas.values())),
        given=given,
        by_group=profile.gram,
        response=PlanSolver(policy).response(profile.schedule),
    )


def with_frontier(policy: Policy) -> Policy:
    """The policy with the frontier of its profile, searched with the fits that it holds."""
    return replace(policy, frontier=profile_frontier(policy).known)


def predicted_psnr(error: float, unit: float) -> float:
    """The PSNR of a result whose latent is ``error`` off; ``unit`` is that of an error of 1.

    For small errors a decoder is a linear map, so that one number relates the two.

    Example:
        >>> predicted_psnr(0.01, unit=12.0)
        52.0
    """
    return unit - 20 * math.log10(max(error, TINY))


def error_of(psnr: float, unit: float) -> float:
    """The latent error at which a PSNR is reached; undoes ``predicted_psnr``.

    Example:
        >>> round(error_of(52.0, unit=12.0), 6)
        0.01
    """
    return float(10 ** ((unit - psnr) / 20))


def measured_unit(psnr: float, error: float) -> float:
    """The unit, from a measured PSNR and the error of the latent.

    Example:
        >>> measured_unit(52.0, 0.01)
        12.0
    """
    return psnr + 20 * math.log10(max(error, TINY))


def guess_unit(profile: Profile) -> float:
    """The unit of an unknown decoder: an error is the same share of the spread in both spaces.

    That is, an error of a tenth of the latents' spread is taken for a tenth of the pixels' spread,
    a quarter of their range. Decoders of real models are some decibels off.
    """
    return 20 * math.log10(max(profile.statistics.final_spread, TINY) / PIXEL_SPREAD)
