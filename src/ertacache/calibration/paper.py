"""The paper's calibration on the network: its policy search, then phi, K and B in runs under it.

``solve`` uses the outputs of the full runs and needs no network. Here the network is evaluated on
every step of accelerated runs, as Algorithm 2 and the closed forms are printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ertacache.calibration.session import Session
from ertacache.calibration.solve import PaperOptions
from ertacache.core.paper import adjusted_sigmas, pick_schedule, reuse_distances, sweep_profile
from ertacache.core.paper_steppers import GainFit, ThresholdSearch
from ertacache.core.plans import PaperPlan, Reuse
from ertacache.core.sampler import Stepper
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.solve import profile_of

__all__ = ["PASSES", "PaperCalibration", "calibrate_paper", "check_one_call"]

PASSES = 6
"""Thresholds that are tried for a number of computed steps; most need two or three."""

_MORE = 12  # if all of them computed too many steps


def calibrate_paper(
    session: Session,
    policy: Policy,
    runs: Sequence[ProfiledPrompt],
    *,
    budget: int | None = None,
    threshold: float | None = None,
    options: PaperOptions,
) -> FittedPlan:
    """A plan of the paper's method, calibrated in runs of the pipeline.

    One run of all prompts per threshold that is tried, in which phi is measured too, and one run on
    the adjusted sigmas to fit K and B; the network is evaluated on all T steps of each.

    Args:
        session: the pipeline.
        policy: with the profile; ``runs`` are among its runs.
        runs: calibration prompts and seeds.
        budget: number of computed steps.
        threshold: the paper's lambda, in place of a budget.
        options: the parts of the method.
    """
    work, progress = (
        PaperCalibration(session, policy, runs, options.reuse),
        session.progress("refit"),
    )
    steps = work.num_steps
    if threshold is not None:
        found = work.search(threshold)
    elif budget is None or not 2 <= budget <= steps:
        raise ValueError(f"cannot compute {budget} of {steps} steps")
    else:
        found = work.search_budget(budget, progress=lambda done: progress(done, PASSES + 1))
    plan = work.fit(found, adjust_timesteps=options.adjust_timesteps, rectify=options.rectify)
    progress(PASSES + 1, PASSES + 1)
    return FittedPlan(plan, work.sigmas)


def check_one_call(runs: Sequence[ProfiledPrompt]) -> None:
    """Raise if runs cannot share a call of the pipeline."""
    if any(run.arguments != runs[0].arguments for run in runs):
        raise ValueError("the paper's method is calibrated with one value of every argument")


@dataclass(frozen=True, eq=False)
class PaperCalibration:
    """The calibration runs of the paper's method.

    Attributes:
        session: the pipeline.
        policy: with the profile; ``runs`` are among its runs.
        runs: calibration prompts and seeds of equal arguments, all in one call of the pipeline.
        reuse: what a reused step returns.
    """

    session: Session
    policy: Policy
    runs: Sequence[ProfiledPrompt]
    reuse: Reuse = "residual"

    def __post_init__(self) -> None:
        """Refuse runs that cannot share a call."""
        check_one_call(self.runs)

    @property
    def sigmas(self) -> Tensor:
        """The nominal sigma schedule."""
        return profile_of(self.policy).schedule.sigmas

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.sigmas) - 1

    def search(self, threshold: float) -> ThresholdSearch:
        """Algorithm 2 for one threshold."""
        part = profile_of(self.policy).select(list(self.runs))
        _, norms = reuse_distances(part.statistics, self.reuse)
        chosen = norms.mean(0)
        search = ThresholdSearch(threshold, norms=chosen, reuse=self.reuse)
        self._run(search)
        return search

    def search_budget(
        self, budget: int, *, progress: Callable[[int], None] | None = None
    ) -> ThresholdSearch:
        """Algorithm 2 for a number of computed steps, or the most below it.

        Begins with the threshold that the profile suggests. A run that computes d steps too many
        (or too few) moves the threshold past the d-th smallest error of its computed (largest of
        its reused) steps, within what earlier runs have left open. Ends with the first run that
        hits the number, or after ``PASSES`` runs with the nearest below it; while there is none
        below, larger and larger thresholds follow.
        """
        distances = reuse_distances(profile_of(self.policy).statistics, self.reuse)
        threshold, _ = pick_schedule(sweep_profile(*distances), budget)
        low, high, best = 0.0, math.inf, None
        for done in range(1, PASSES + _MORE + 1):
            found = self.search(threshold)
            if progress is not None:
                progress(min(done, PASSES))
            surplus = len(found.compute_steps) - budget
            if surplus <= 0 and (
                best is None or len(found.compute_steps) > len(best.compute_steps)
            ):
                best = found
            if surplus == 0 or (best is not None and done >= PASSES):
                break
            low, high = (threshold, high) if surplus > 0 else (low, threshold)
            threshold = _next_threshold(found, surplus, low, high) if done < PASSES else 1.2 * low
        return best or self.search(math.inf)

    def fit(
        self,
        found: ThresholdSearch,
        *,
        adjust_timesteps: bool = True,
        rectify: bool = True,
        mode: Literal["scalar", "element"] = "scalar",
    ) -> PaperPlan:
        """The plan of a search: its sigmas from phi, K and B from one more run.

        Args:
            found: the search.
            adjust_timesteps: adjust the sigma schedule.
            rectify: rectify reused outputs.
            mode: what shares one K and B; channels have no common place in pipelines' latents.
        """
        sigmas = self.sigmas
        if adjust_timesteps:
            sigmas = adjusted_sigmas(sigmas, found.step_scales)
        plan = PaperPlan(found.compute_steps, self.reuse, sigmas)
        if not rectify or len(found.compute_steps) == plan.num_steps:
            return plan
        gain = GainFit(plan, mode=mode)
        self._run(gain)
        return gain.plan()

    def _run(self, stepper: Stepper) -> None:
        plan = PaperPlan(tuple(range(self.num_steps)), self.reuse, self.sigmas)
        policy = Policy(self.policy.fingerprint, plans=(FittedPlan(plan, self.sigmas),))
        self.session.lockstep(self.runs, policy, stepper)


def _next_threshold(found: ThresholdSearch, surplus: int, low: float, high: float) -> float:
    """A threshold strictly between ``low`` (too many steps) and ``high`` (too few)."""
    computed = set(found.compute_steps)
    errors: list[float] = found.errors.tolist()
    if surplus > 0:
        ranked = sorted(e for k, e in enumerate(errors) if k in computed and e > 0)
        guess = math.nextafter(ranked[min(surplus, len(ranked)) - 1], math.inf) if ranked else low
    else:
        ranked = sorted((e for k, e in enumerate(errors) if k not in computed), reverse=True)
        guess = ranked[min(-surplus, len(ranked)) - 1] if ranked else high
    if low < guess < high:
        return guess
    return 2 * low if math.isinf(high) else (low + high) / 2
