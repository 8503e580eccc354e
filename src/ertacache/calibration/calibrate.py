"""Calibration from end to end: profile, solve, refit in closed loop, validate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ertacache.calibration.paper import calibrate_paper
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import REFIT_PROMPTS, check_refit_prompts, refit_policy
from ertacache.calibration.session import HELDOUT_SEED, Session, Stage, number_runs
from ertacache.calibration.solve import (
    Method,
    PaperOptions,
    Target,
    choose_point,
    guess_unit,
    make_policy,
    measured_unit,
    solve,
    solve_profile,
)
from ertacache.calibration.validate import Variant, measure, validate
from ertacache.core.frontier import Frontier, FrontierPoint
from ertacache.core.plans import Reuse
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.private_api import Pipeline

__all__ = ["calibrate"]

TRIAL_PROMPTS = 4
TRIES = 3


def calibrate(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    max_error: float | None = None,
    min_psnr: float | None = None,
    threshold: float | None = None,
    method: Method = "trajectory",
    reuse: Reuse = "residual",
    adjust_timesteps: bool = True,
    rectify: bool = True,
    heldout: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    refit: bool = True,
    refit_prompts: int = REFIT_PROMPTS,
    profile_path: str | os.PathLike[str] | None = None,
    stage: Stage | None = None,
    **call: Any,
) -> Policy:
    """Calibrate a policy: profile, solve, refit, measure. Give exactly one target, as in ``solve``.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        prompts: the calibration prompts; a handful will do, 8 to 32 are better.
        speedup: target: at least this many times fewer computed steps than steps.
        compute_steps: target: this many computed steps.
        max_error: target: predicted error of the final latent.
        min_psnr: target: PSNR to the full run on the held-out prompts; see ``missed_target``.
        threshold: target: the paper's lambda.
        method: trajectory rectification, or ``"paper"``.
        reuse: the paper's method: what a reused step returns.
        adjust_timesteps: the paper's method: adjust the sigma schedule.
        rectify: the paper's method: rectify reused outputs.
        heldout: prompts to validate on; by default a quarter of ``prompts`` is held out.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline, and of the network during the refit.
        refit: refit in closed loop; the paper's method: calibrate on the network.
        refit_prompts: calibration prompts to refit on; their latents are held in memory.
        profile_path: file that the profile is written to as it grows, and resumed from.
        stage: called with the name of every stage; returns what is called with its progress.
        **call: arguments of the pipeline, such as ``num_inference_steps``.
    """
    target = Target(speedup, compute_steps, max_error, min_psnr, threshold, method)
    options = PaperOptions(reuse, adjust_timesteps, rectify)
    session = Session(pipe, call, batch_size=batch_size, stage=stage)
    fitted, heldout = _split(prompts, heldout)
    runs, unseen = number_runs(fitted, seed), number_runs(heldout, seed + HELDOUT_SEED)
    refitted = runs[: check_refit_prompts(refit_prompts) if refit else 0]
    keep = refitted if method == "trajectory" else []
    profile = profile_runs(session, runs, path=profile_path, keep=keep)
    policy = _Calibration(session, profile, refitted, unseen).calibrate(target, options)
    provenance = dict(policy.provenance) | {"network calls": str(session.evaluations)}
    return replace(policy, provenance=provenance)


@dataclass(frozen=True, eq=False)
class _Calibration:
    """A calibration after profiling.

    Attributes:
        session: the pipeline.
        profile: its full runs.
        runs: those to refit on; none solves from the profile alone.
        heldout: prompts and seeds to validate on.
    """

    session: Session
    profile: Profile
    runs: Sequence[ProfiledPrompt]
    heldout: Sequence[ProfiledPrompt]

    def calibrate(self, target: Target, options: PaperOptions) -> Policy:
        """The validated policy of a target."""
        session, profile = self.session, self.profile
        if target.min_psnr is not None:
            return self.reach(target.min_psnr)
        if self.runs and target.method == "paper":
            policy = calibrate_paper(session, profile, self.runs, target=target, options=options)
            return self._validated(policy)
        session.progress("solve")
        return self._refitted(solve(profile, **vars(target), **vars(options)))

    def _refitted(self, policy: Policy) -> Policy:
        if self.runs:
            policy = refit_policy(self.session, policy, self.profile, self.runs)
        return self._validated(policy)

    def _validated(self, policy: Policy) -> Policy:
        return replace(policy, validation=validate(self.session, policy, self.heldout))

    def reach(self, psnr: float) -> Policy:
        """The fewest computed steps that reach a PSNR on held-out prompts, in a few tries.

        A trial run on calibration prompts measures what a latent error is in decibels. A try that
        misses raises the prediction by what it lacked. If none reaches the PSNR, the policy that
        came nearest is returned.
        """
        self.session.progress("solve")
        frontier = solve_profile(self.profile)
        unit = self._measure_unit(frontier, psnr)
        point = choose_point(frontier, psnr, unit=unit)
        origin = {"unit psnr": f"{unit:.3f}"}
        tried: list[Policy] = []
        while point is not None and len(tried) < TRIES:
            tried.append(self._refitted(self._policy(point, target_psnr=psnr, provenance=origin)))
            measured = _measured(tried[-1]).psnr
            if measured >= psnr:
                return tried[-1]
            unit = min(unit, measured_unit(measured, point.predicted_error))
            point = choose_point(frontier, psnr, unit=unit, above=point.computed)
        return max(tried, key=lambda policy: _measured(policy).psnr)

    def _measure_unit(self, frontier: Frontier, psnr: float) -> float:
        """The PSNR of a latent error of 1, from calibration prompts run in full and with a plan."""
        profile = self.profile
        point = choose_point(frontier, psnr, unit=guess_unit(profile))
        if point is None:
            raise ValueError("a run of fewer than three steps leaves none to reuse")
        steps = profile.num_steps
        trial = Variant("trial", point.computed, self._policy(point), steps)
        variants = [Variant("full", steps, None, steps), trial]
        measure(self.session, variants, profile.prompts[:TRIAL_PROMPTS], stage="trial")
        return measured_unit(sum(trial.decibels) / len(trial.decibels), point.predicted_error)

    def _policy(self, point: FrontierPoint, **facts: Any) -> Policy:
        error = point.predicted_error
        return make_policy(
            self.profile, point.plan, embed=self.profile, predicted_error=error, **facts
        )


def _measured(policy: Policy) -> ValidationRow:
    row = policy.measured
    assert row is not None  # it was validated
    return row


def _split(prompts: Sequence[str], heldout: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Calibration and held-out prompts; a quarter is held out unless others are given."""
    if heldout is not None:
        return list(prompts), list(heldout)
    number_runs(prompts)
    if len(prompts) < 2:
        return list(prompts), list(prompts)  # another seed is all there is to hold out
    count = max(1, len(prompts) // 4)
    return list(prompts[:-count]), list(prompts[-count:])
