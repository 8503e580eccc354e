"""Trials: solved plans, run on calibration prompts, to measure how plans are fitted best.

A simulation cannot tell how far outputs at accelerated latents are off, so that the ridge that it
prefers may be far too weak where guidance is strong. Here plans of a few budgets are run with
several ridges. What is kept for all plans that are solved later: the best fit by number of
computed steps, how much larger the error was than predicted, and what an error of the latent is in
decibels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ertacache.calibration.lockstep import run_plan
from ertacache.calibration.session import Reference, Session, group_runs
from ertacache.core.distance import robust_distance, typical_distance
from ertacache.core.frontier import (
    FrontierPoint,
    MeasuredFit,
    solve_frontier,
)
from ertacache.core.plans import steps_for_speedup
from ertacache.core.simulate import Fit
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.solve import measured_unit, profile_frontier, profile_of
from ertacache.metrics import IDENTICAL, psnr

__all__ = ["SPEEDUPS", "measure_fits", "regret", "with_frontier"]

SPEEDUPS = (1.5, 2.0, 3.0, 5.0)
"""Speed-ups whose plans are run."""

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
FIRST = 2  # the ridge to begin with
TRIAL_PROMPTS = 16
DECODED = 8  # prompts that are decoded, to measure decibels
TINY = 1e-12  # an error below it is none
AROUND = 2  # budgets more and less that are searched along


def measure_fits(session: Session, policy: Policy, runs: Sequence[ProfiledPrompt]) -> Policy:
    """Run plans of several budgets and ridges; returns the policy with what was found.

    Plans are fitted on the first half of the runs and run on the second. With one run there is
    nothing to measure.

    Args:
        session: the pipeline.
        policy: with the profile of all runs.
        runs: calibration prompts.
    """
    profile, half = profile_of(policy), len(runs) // 2
    budgets = trial_budgets(profile)
    if half == 0 or not budgets:
        return policy
    reference = session.reference(runs[half : half + TRIAL_PROMPTS])
    trial = _Trial(session, policy, profile.select(list(runs[:half])), reference)
    progress, found = session.progress("trial"), []
    place = FIRST
    for done, budget in enumerate(budgets):
        progress(done, len(budgets) + 1)
        candidate, place = trial.best(budget, place)
        found.append(candidate)
    progress(len(budgets), len(budgets) + 1)
    unit = trial.unit(found[len(found) // 2])
    progress(len(budgets) + 1, len(budgets) + 1)
    fits = tuple(candidate.measured for candidate in reversed(found))
    return replace(policy, fits=fits, unit_psnr=unit)


def trial_budgets(profile: Profile) -> list[int]:
    """Numbers of computed steps whose plans are run, descending."""
    steps, least = profile.num_steps, 2 + len(profile.expert_steps)
    found = {steps_for_speedup(steps, s) for s in SPEEDUPS if s <= steps / 2}
    return sorted((n for n in found if least <= n < steps), reverse=True)


def with_frontier(policy: Policy) -> Policy:
    """The policy with the frontier of its profile, searched with the fits that it holds."""
    return replace(policy, frontier=profile_frontier(policy).known)


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
    def measured(self) -> MeasuredFit:
        """How it was fitted, and how its error compares with the predicted one."""
        ratio = typical_distance(self.distances) / max(self.point.predicted_error, TINY)
        return MeasuredFit(self.point.computed, self.point.fit, max(ratio, TINY), self.uniform)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Runs plans that are fitted on a part of the profile.

    Attributes:
        session: the pipeline.
        policy: what is attached.
        part: the runs that plans are fitted on.
        reference: the full runs of other prompts.
    """

    session: Session
    policy: Policy
    part: Profile
    reference: Reference

    def best(self, budget: int, start: int) -> tuple[_Candidate, int]:
        """The best plan of a budget, and the place of its ridge, looked for from ``start``."""
        tried: dict[int, _Candidate] = {start: self.attempt(budget, start)}

        def climb(towards: int) -> None:
            place = min(tried) if towards < 0 else max(tried)
            while 0 <= place + towards < len(RIDGES):
                tried[place + towards] = self.attempt(budget, place + towards)
                if self._best(tried) != place + towards:
                    return
                place += towards

        climb(+1)  # fewer computed steps need a stronger one
        if self._best(tried) == start:
            climb(-1)
        place = self._best(tried)
        uniform = self.attempt(budget, place, uniform=True)
        return (tried[place], uniform)[self._ranked([tried[place], uniform])], place

    def attempt(self, budget: int, place: int, *, uniform: bool = False) -> _Candidate:
        """Solve a plan with one of the ridges and run it."""
        known = MeasuredFit(budget, Fit(ridge=RIDGES[place]), 1.0, uniform)
        steps, least = self.part.num_steps, 2 + len(self.part.expert_steps)
        near = range(max(least, budget - AROUND), min(steps, budget + AROUND) + 1)
        point = solve_frontier(
            self.part.statistics.gram,
            self.part.schedule.nominal,
            budgets=[budget] if uniform else near,
            measured=[known],
            pinned=self.part.expert_steps,
        ).point(budget)
        facts = self.policy.fingerprint
        found = run_plan(self.session, self.reference, point.plan, fingerprint=facts)
        return _Candidate(point, uniform, found)

    def unit(self, candidate: _Candidate) -> float:
        """PSNR of a latent error of 1, from a few prompts decoded in full and with a plan."""
        runs = group_runs(self.reference.runs)[0][:DECODED]
        places = [self.reference.runs.index(run) for run in runs]
        schedule = self.part.schedule
        plan = FittedPlan(candidate.point.plan, schedule.sigmas, target=schedule.target)
        attached = Policy(self.policy.fingerprint, plans=(plan,))
        decibels: list[float] = []
        for batch in self.session.batches(runs):
            full = self.session.generate(batch, phase="trial").results
            found = self.session.generate(batch, attached, phase="trial").results
            decibels += psnr(found, full).clamp_max(IDENTICAL).tolist()
        error = typical_distance(candidate.distances[places])
        return measured_unit(sum(decibels) / len(decibels), error)

    def _best(self, tried: dict[int, _Candidate]) -> int:
        places = sorted(tried)
        return places[self._ranked([tried[place] for place in places])]

    def _ranked(self, candidates: Sequence[_Candidate]) -> int:
        """The number of the candidate whose worst kind of run is best."""
        found = regret([by_group(self.reference.runs, c.distances) for c in candidates])
        return found.index(min(found))
