"""Trials: solved plans, run on calibration prompts, to measure how plans are fitted best.

A simulation cannot tell how far outputs at accelerated latents are off, so that the ridge that it
prefers may be far too weak where guidance is strong. Here plans of a few budgets are run with
several ridges, priors and groups. What is kept for all plans that are solved later: the best fit by
number of computed steps, how much larger the error was than predicted, and what an error of the
latent is in decibels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ertacache.calibration.lockstep import digest, measure_response, run_plan
from ertacache.calibration.reference import Reference
from ertacache.calibration.session import Session, group_runs
from ertacache.calibration.sharing import Record
from ertacache.calibration.validate import psnr_to_full
from ertacache.core.distance import robust_distance, typical_distance
from ertacache.core.frontier import PLAIN, FrontierPoint, MeasuredFit, solve_frontier
from ertacache.core.groups import Groups
from ertacache.core.plans import TrajectoryPlan, steps_for_speedup
from ertacache.core.simulate import MAX_ORDER, Fit
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.solve import (
    PlanSolver,
    measured_unit,
    profile_frontier,
    profile_of,
    with_frontier,
)

__all__ = ["SPEEDUPS", "Search", "measure_fits", "regret", "rest_of"]

SPEEDUPS = (1.5, 2.0, 3.0, 5.0)
"""Speed-ups whose plans are run."""

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
FIRST = 1e-2  # the ridge to begin with
STRONG = 1.0  # a ridge with which a plan is nearly its prior
MARGIN = 10 ** (0.3 / 20)  # what is less simple has to be better by 0.3 dB
PROMPTS = 16
DECODED = 8  # prompts that are decoded, to measure decibels, and that the response is measured on
PLAIN_REUSE = 3  # of so many steps one is computed, to measure the response
TINY = 1e-12  # an error below it is none
AROUND = 2  # budgets more and less that are searched along

Found = TypeVar("Found")


def measure_fits(session: Session, policy: Policy, runs: Sequence[ProfiledPrompt]) -> Policy:
    """Run plans of several budgets and ridges; the policy with what was found and its frontier.

    Plans are run on one half of the runs and fitted on the rest of the profile. Then the frontier
    is searched. At the budgets tried its compute schedules are run as well, because the one of the
    lowest simulated error may be worse than the one tried. How the errors of what is kept compare
    with the predicted ones is measured on the other half too, which had no part in the choice.
    With one run there is nothing to measure.

    Args:
        session: the pipeline.
        policy: with the profile of all runs.
        runs: calibration prompts.
    """
    profile = profile_of(policy)
    budgets, (rest, others) = trial_budgets(profile), profile.halves(runs)
    if not others or not budgets:
        return with_frontier(policy)
    whole = session.reference(runs)  # all of them are needed for the refit

    def reference(half: Sequence[ProfiledPrompt]) -> Reference:
        return whole.select(whole.places(half[:PROMPTS]))

    progress, found, total = session.progress("trial"), list[_Candidate](), 2 * len(budgets) + 1
    progress(0, total)
    response = _response(session, policy, whole.select(whole.places(rest[:DECODED])))
    trial, swapped = (
        _Trial(session, policy, rest_of(profile, half), reference(half), response)
        for half in (others, rest)
    )
    start = Fit(ridge=FIRST)
    for done, budget in enumerate(budgets):
        progress(done, total)
        found.insert(0, trial.best(budget, start))
        start = _next_start(start, found[0].point.fit)
    progress(len(budgets), total)
    policy = replace(
        policy,
        fits=tuple(_measured_fit(each) for each in found),
        unit_psnr=trial.unit(found[(len(found) - 1) // 2]),
        response=tuple(response.tolist()),
    )
    frontier, kept, fits = profile_frontier(policy), list[FrontierPoint](), list[MeasuredFit]()
    for done, tried in enumerate(found, len(budgets) + 1):
        progress(done, total)
        best = trial.compare(tried, frontier.point(tried.point.computed))
        fits.append(_measured_fit(best, swapped.follow(best.steps, best)))
        if best is tried:
            kept += profile_frontier(policy, given=[best.steps]).points
    progress(total, total)
    return replace(policy, fits=tuple(fits), frontier=frontier.corrected(fits, kept).known)


def _next_start(start: Fit, best: Fit) -> Fit:
    """What to begin the next budget with: as the best one so far, but for its prior and groups."""
    if best.order:  # such a ridge is strong because of its prior
        return replace(start, response=best.response)
    ridge = min(best.ridge, RIDGES[-1])  # that of plain reuse is beyond all
    return replace(start, response=best.response, ridge=ridge)


def _response(session: Session, policy: Policy, reference: Reference) -> Tensor:
    """How outputs respond to errors of the latent, measured with plain reuse."""
    schedule = reference.schedule
    budget = max(2, schedule.num_steps // PLAIN_REUSE)
    plain = PlanSolver(policy).plain(schedule, budget).plan
    assert isinstance(plain, TrajectoryPlan)
    return measure_response(session, reference, plain, fingerprint=policy.fingerprint)


def trial_budgets(profile: Profile) -> list[int]:
    """Numbers of computed steps whose plans are run, descending."""
    steps, least = profile.num_steps, 2 + len(profile.expert_steps)
    found = {steps_for_speedup(steps, s) for s in SPEEDUPS if s <= steps / 2}
    return sorted((n for n in found if least <= n < steps), reverse=True)


def rest_of(profile: Profile, others: Sequence[ProfiledPrompt]) -> Profile:
    """The profile of the folds that hold none of some runs; if all do, of all other runs.

    By whole folds, because only those have statistics by group.
    """
    fold = dict(zip(profile.runs, profile.folds, strict=True))
    held = {fold[run] for run in others}
    apart = [run for run in profile.runs if fold[run] not in held]
    return profile.select(apart or [run for run in profile.runs if run not in others])


def regret(errors: Sequence[Sequence[float]]) -> list[float]:
    """How much worse each candidate is than the best one, on the kind of run where it is worst.

    Args:
        errors: of every candidate, one for each kind of run.

    Example:
        >>> regret([[1.0, 8.0], [1.5, 4.0]])
        [2.0, 1.5]
    """
    best = [min(column) for column in zip(*errors, strict=True)]
    return [
        max(error / max(low, 1e-300) for error, low in zip(row, best, strict=True))
        for row in errors
    ]


def by_group(runs: Sequence[ProfiledPrompt], found: Tensor) -> list[float]:
    """Robust distance of the runs of each kind, those with equal arguments."""
    return [
        robust_distance(found[[runs.index(run) for run in group]]) for group in group_runs(runs)
    ]


class Search(Generic[Found]):
    """Looks for the best fit, one of its parts after the other.

    Attributes:
        best: the best so far.
    """

    def __init__(
        self,
        attempt: Callable[[Fit], Found],
        better: Callable[[Found, Found, float], bool],
        start: Fit,
    ) -> None:
        """Begin with a fit.

        Args:
            attempt: runs a plan that is fitted in this way.
            better: whether the first is better than the second by a factor.
            start: the fit.
        """
        self._attempt, self._better = attempt, better
        self.fit, self.best = start, attempt(start)

    def challenge(self, fit: Fit, margin: float = 1.0) -> bool:
        """Try a fit; return whether it is better, and then the best."""
        found = self._attempt(fit)
        if not self._better(found, self.best, margin):
            return False
        self.fit, self.best = fit, found
        return True

    def climb_ridges(self) -> None:
        """Stronger ridges while they are better; weaker ones if the next stronger is not."""
        first = RIDGES.index(self.fit.ridge)
        for ridge in RIDGES[first + 1 :]:  # fewer computed steps need stronger ones
            if not self.challenge(replace(self.fit, ridge=ridge)):
                break
        if self.fit.ridge == RIDGES[first]:
            for ridge in reversed(RIDGES[:first]):
                if not self.challenge(replace(self.fit, ridge=ridge)):
                    break

    def try_response(self) -> None:
        """Simulate the measured response in place of errors in any direction, or the reverse.

        With the response weak ridges are safe more often. It has to be better by the margin.
        """
        ridges, margin = [self.fit.ridge], 1.0
        if not self.fit.response:
            ridges, margin = [self.fit.ridge, RIDGES[0]], MARGIN
        for ridge in dict.fromkeys(ridges):
            other = replace(self.fit, response=not self.fit.response, ridge=ridge)
            if self.challenge(other, margin):
                self.climb_ridges()
                break

    def try_orders(self) -> None:
        """Pull towards polynomials, which shows with a strong ridge."""
        for order in range(1, MAX_ORDER + 1):
            fit = replace(self.fit, order=order, ridge=max(STRONG, self.fit.ridge))
            if self.challenge(fit):
                self.climb_ridges()

    def try_groups(self, finest: Groups | None) -> None:
        """Divide the latent, at first into few groups; then with a weaker ridge, if it helped."""
        if finest is None:
            return
        undivided = self.fit.groups
        divisions = (Groups(bands=finest.bands), Groups(channels=finest.channels), finest)
        for groups in dict.fromkeys(divisions):
            if groups != undivided:
                self.challenge(replace(self.fit, groups=groups), MARGIN)
        if self.fit.groups != undivided and self._weaker() != self.fit.ridge:
            self.challenge(replace(self.fit, ridge=self._weaker()))

    def try_branch(self) -> None:
        """Add a second history, with the ridge so far and a weaker one."""
        for ridge in dict.fromkeys((self.fit.ridge, self._weaker())):
            margin = 1.0 if self.fit.branch else MARGIN
            self.challenge(replace(self.fit, branch=True, ridge=ridge), margin)

    def _weaker(self) -> float:
        """The next weaker ridge, if there is one."""
        return RIDGES[max(0, RIDGES.index(self.fit.ridge) - 1)]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A plan that was run.

    Attributes:
        point: the plan, how it was fitted and its predicted error.
        uniform: whether its compute schedule is the uniform one.
        distances: of every prompt, shape (P,).
    """

    point: FrontierPoint
    uniform: bool
    distances: Tensor

    @property
    def steps(self) -> tuple[int, ...]:
        """Its compute schedule."""
        return self.point.plan.compute_steps

    @property
    def ratios(self) -> Tensor:
        """Error of every prompt over the predicted one, shape (P,)."""
        return self.distances / max(self.point.predicted_error, TINY)


def _measured_fit(*found: _Candidate) -> MeasuredFit:
    """How candidates with equal fits were fitted, and their error ratio."""
    ratio, first = typical_distance(torch.cat([each.ratios for each in found])), found[0]
    return MeasuredFit(first.point.computed, first.point.fit, max(ratio, TINY), first.uniform)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Runs plans that are fitted on a part of the profile.

    Attributes:
        session: the pipeline.
        policy: what is attached.
        part: the runs that plans are fitted on.
        reference: the full runs of other prompts.
        response: of the outputs to errors of the latent.
    """

    session: Session
    policy: Policy
    part: Profile
    reference: Reference
    response: Tensor

    def best(self, budget: int, start: Fit) -> _Candidate:
        """The best plan of a budget that is found, beginning with a fit."""

        def attempt(fit: Fit, *, uniform: bool = False) -> _Candidate:
            return self.attempt(budget, fit, uniform=uniform)

        search = Search(attempt, self._better, start)
        search.climb_ridges()
        search.try_response()
        search.try_orders()
        search.try_groups(self.part.finest)
        evenly = [search.fit]
        if 2 * budget <= self.part.num_steps:
            # What needs no calibration is a candidate too, plain reuse (order 0) among it.
            evenly += [Fit(ridge=PLAIN, order=order) for order in range(MAX_ORDER + 1)]
        best = search.best
        for fit in evenly:
            uniform = attempt(fit, uniform=True)
            best = uniform if self._better(uniform, best, 1.0) else best
        return best

    def attempt(self, budget: int, fit: Fit, *, uniform: bool = False) -> _Candidate:
        """Solve a plan with a fit and run it."""
        known = MeasuredFit(budget, fit, 1.0, uniform)
        steps, least = self.part.num_steps, 2 + len(self.part.expert_steps)
        near = range(max(least, budget - AROUND), min(steps, budget + AROUND) + 1)
        return self._run(known, budgets=[budget] if uniform else near)

    def follow(self, steps: tuple[int, ...], tried: _Candidate) -> _Candidate:
        """Fit a compute schedule as another was, and run it."""
        known = MeasuredFit(len(steps), tried.point.fit, 1.0, tried.uniform)
        return self._run(known, budgets=[len(steps)], given=[steps])

    def compare(self, tried: _Candidate, point: FrontierPoint) -> _Candidate:
        """What was tried, or what the frontier has in its place if that is not worse."""
        steps = point.plan.compute_steps
        if steps == tried.steps:
            return tried
        other = self.follow(steps, tried)
        return tried if self._better(tried, other, 1.0) else other

    def _run(self, known: MeasuredFit, **search: Any) -> _Candidate:
        """Solve a plan, with further arguments of ``solve_frontier``, and run it."""
        point = solve_frontier(
            self.part.run_grams(),
            self.part.schedule.nominal,
            measured=[known],
            pinned=self.part.expert_steps,
            by_group=self.part.gram,
            response=self.response,
            **search,
        ).point(round(known.computed))
        facts = self.policy.fingerprint
        found = run_plan(self.session, self.reference, point.plan, fingerprint=facts)
        return _Candidate(point, known.uniform, found)

    def unit(self, candidate: _Candidate) -> float:
        """PSNR of a latent error of 1, from a few prompts decoded in full and with a plan."""
        runs = group_runs(self.reference.runs)[0][:DECODED]
        places = [self.reference.runs.index(run) for run in runs]
        schedule = self.part.schedule
        plan = FittedPlan(candidate.point.plan, schedule.sigmas, target=schedule.target)
        attached = Policy(self.policy.fingerprint, plans=(plan,))

        def decode(batch: Sequence[ProfiledPrompt]) -> Record:
            full = self.session.generate(batch, phase="trial").results
            found = self.session.generate(batch, attached, phase="trial").results
            return {"decibels": psnr_to_full(found, full)}

        batches, facts = self.session.batches(runs), digest(candidate.point.plan)
        shared = self.session.sharing.share("unit", batches, decode, facts=facts)
        decibels = [level for record in shared for level in record["decibels"].tolist()]
        error = typical_distance(candidate.distances[places])
        return measured_unit(sum(decibels) / len(decibels), error)

    def _better(self, one: _Candidate, other: _Candidate, margin: float) -> bool:
        """Whether the worst kind of run of one is better than that of the other by a factor."""
        runs = self.reference.runs
        found = regret([by_group(runs, c.distances) for c in (one, other)])
        return found[0] * margin < found[1]
