"""Calibration from end to end: profile, try, solve, refit in closed loop, validate."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ertacache.calibration.paper import calibrate_paper, check_one_call
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import REFIT_PROMPTS, check_refit_prompts, refit_budget
from ertacache.calibration.rehearsal import rehearse
from ertacache.calibration.session import HELDOUT_SEED, Session, Stage, open_session
from ertacache.calibration.solve import (
    Method,
    PaperOptions,
    check_method,
    check_threshold,
    solve,
)
from ertacache.calibration.trial import measure_fits
from ertacache.calibration.validate import NOT_HELD_OUT, hold_out, validate
from ertacache.core.plans import Reuse, Target
from ertacache.distributed import ALONE, Processes
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.lock import locked
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.private_api import Pipeline
from ertacache.integration.solve import PlanSolver, measured_unit, profile_of, with_frontier

__all__ = ["SPEEDUPS", "Targets", "calibrate"]

SPEEDUPS = (2.0, 3.0)
"""Speed-ups that are refitted unless others are given."""

TRIES = 3
OVERLAP = (
    "{} of {} calibration prompts are to be validated on, too, and are left out of the calibration"
)


@dataclass(frozen=True)
class Targets:
    """What plans are refitted for: exactly one kind of target.

    Attributes:
        budgets: speed-ups or numbers of computed steps.
        given: whether they were given; of the default ones, those that do not fit are left out.
        min_psnr: PSNR to the full run on held-out prompts, in dB.
        threshold: the paper's lambda.
        method: trajectory rectification, or the paper's.
    """

    budgets: tuple[Target, ...] = ()
    given: bool = True
    min_psnr: float | None = None
    threshold: float | None = None
    method: Method = "trajectory"

    @classmethod
    def of(
        cls,
        method: Method,
        *,
        speedup: float | Sequence[float] | None = None,
        compute_steps: int | Sequence[int] | None = None,
        min_psnr: float | None = None,
        threshold: float | None = None,
    ) -> Targets:
        """Check what was given; without any target those of ``SPEEDUPS``.

        Example:
            >>> [target.speedup for target in Targets.of("trajectory").budgets]
            [2.0, 3.0]
        """
        check_method(method)
        given = {
            "speedup": speedup,
            "compute_steps": compute_steps,
            "min_psnr": min_psnr,
            "threshold": threshold,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"give one kind of target, not {' and '.join(named)}")
        if threshold is not None:
            return cls(threshold=check_threshold(threshold, method), method=method)
        if min_psnr is not None:
            if method == "paper":
                raise ValueError(
                    "the paper's method predicts no error: give a speedup or a threshold"
                )
            return cls(min_psnr=Target(min_psnr=min_psnr).min_psnr)
        if compute_steps is not None:
            counts = [compute_steps] if isinstance(compute_steps, int) else list(compute_steps)
            targets = _distinct([Target(compute_steps=count) for count in counts])
            return cls(targets, method=method)
        factors = SPEEDUPS if speedup is None else speedup
        listed = [factors] if isinstance(factors, int | float) else list(factors)
        targets = _distinct([Target(speedup=factor) for factor in listed])
        return cls(targets, given=speedup is not None, method=method)

    def check(self, num_steps: int) -> list[int]:
        """The numbers of computed steps in runs of ``num_steps``; raise if one is impossible."""
        found = []
        for target in self.budgets:
            if target.speedup is not None and target.speedup > num_steps / 2:
                if not self.given and num_steps >= 4:
                    continue
                raise ValueError(
                    f"speedup must be between 1 and {num_steps / 2:g}, got {target.speedup:g}"
                )
            if target.compute_steps is not None and not 2 <= target.compute_steps <= num_steps:
                raise ValueError(f"cannot compute {target.compute_steps} of {num_steps} steps")
            budget = target.budget(num_steps)
            assert budget is not None
            found.append(budget)
        return list(dict.fromkeys(found))


def _distinct(targets: list[Target]) -> tuple[Target, ...]:
    if not targets:
        raise ValueError("give at least one target")
    return tuple(dict.fromkeys(targets))


def calibrate(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    speedup: float | Sequence[float] | None = None,
    compute_steps: int | Sequence[int] | None = None,
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
    resume: str | os.PathLike[str] | None = None,
    processes: Processes = ALONE,
    provenance: Mapping[str, str] | None = None,
    stage: Stage | None = None,
    **call: Any,
) -> Policy:
    """Calibrate a pipeline: profile, try, solve, refit, measure.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        prompts: the calibration prompts; a handful will do, 8 to 32 are better.
        speedup: refit these speed-ups; by default 2 and 3. All others are solved when needed.
        compute_steps: refit these numbers of computed steps, in place of speed-ups.
        min_psnr: refit the fewest computed steps with this PSNR on held-out prompts, in dB.
        threshold: the paper's lambda.
        method: trajectory rectification, or ``"paper"``.
        reuse: the paper's method: what a reused step returns.
        adjust_timesteps: the paper's method: adjust the sigma schedule.
        rectify: the paper's method: rectify reused outputs.
        heldout: prompts to validate on, may be empty; by default a quarter of ``prompts``. They are
            not calibrated on, unless nothing would remain: a warning, and marked as measured.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline, and of the network during the refit.
        refit: run trials and refit in closed loop; the paper's method: calibrate on the network.
        refit_prompts: calibration prompts to refit on; their latents are kept.
        profile_path: file that the profile is written to as it grows, and resumed from.
        resume: folder that keeps finished runs until the policy is made: the same call continues.
        processes: those that share the runs, each with the same pipeline and arguments.
        provenance: strings to keep in the file besides the call, such as the command line.
        stage: called with the name of every stage; returns what is called with its progress.
        **call: arguments of the pipeline. A list of values, such as ``guidance_scale=[2, 5]``,
            spreads the prompts over them, and the plans serve the whole range.
    """
    targets = Targets.of(
        method, speedup=speedup, compute_steps=compute_steps, min_psnr=min_psnr, threshold=threshold
    )
    work: dict[str, Any] = {"batch_size": batch_size, "stage": stage, "processes": processes}
    count = check_refit_prompts(refit_prompts) if refit else 0
    with open_session(pipe, call, **work, resume=resume, beside=profile_path) as session:
        runs = _Runs.of(session, prompts, heldout, seed=seed, refitted=count)
        options = PaperOptions(reuse, adjust_timesteps, rectify)
        return _Calibration(session, runs, targets, options).run(profile_path, provenance)


@dataclass(frozen=True)
class _Runs:
    """Prompts with their seeds and arguments.

    Attributes:
        calibration: to profile.
        refitted: those of them to try and refit on; none solves from the profile alone.
        heldout: to validate on.
    """

    calibration: list[ProfiledPrompt]
    refitted: list[ProfiledPrompt]
    heldout: list[ProfiledPrompt]

    @classmethod
    def of(
        cls,
        session: Session,
        prompts: Sequence[str],
        heldout: Sequence[str] | None,
        *,
        seed: int,
        refitted: int,
    ) -> _Runs:
        """Number the prompts; a quarter is held out unless others are given."""
        runs = session.number_runs(prompts, seed)
        validated = _last_quarter(prompts) if heldout is None else heldout
        unseen = session.number_runs(validated, seed + HELDOUT_SEED) if validated else []
        held = set(validated)
        fitted = [run for run in runs if run.prompt not in held]
        if not fitted:
            warnings.warn(NOT_HELD_OUT, stacklevel=3)
            fitted = runs
        elif heldout is not None and len(fitted) < len(runs):
            warnings.warn(OVERLAP.format(len(runs) - len(fitted), len(runs)), stacklevel=3)
        session.check_values(fitted)
        return cls(fitted, fitted[:refitted], unseen)

    @property
    def disjoint(self) -> bool:
        """Whether no prompt is both calibrated and validated on."""
        return not {run.prompt for run in self.calibration} & {run.prompt for run in self.heldout}


@dataclass(frozen=True, eq=False)
class _Calibration:
    """One calibration.

    Attributes:
        session: the pipeline.
        runs: prompts and seeds.
        targets: what plans are refitted for.
        options: the parts of the paper's method.
    """

    session: Session
    runs: _Runs
    targets: Targets
    options: PaperOptions

    def _check(self) -> None:
        """Raise for what can be known before anything is profiled."""
        if self.targets.min_psnr is not None and not self.runs.heldout:
            raise ValueError("min_psnr is measured on held-out prompts: heldout must not be empty")
        if self.targets.method == "paper":
            check_one_call(self.runs.refitted)
        first, lockstep = self.runs.calibration[0], len(self.runs.refitted) > 1
        steps = rehearse(self.session, first, lockstep=lockstep)
        if steps is not None:
            self.targets.check(steps)

    def run(
        self, path: str | os.PathLike[str] | None, provenance: Mapping[str, str] | None
    ) -> Policy:
        """Profile, then make the plans."""
        known = self.profile(path, provenance)
        return self.paper(known) if self.targets.method == "paper" else self.trajectory(known)

    def profile(
        self, path: str | os.PathLike[str] | None, provenance: Mapping[str, str] | None
    ) -> Policy:
        """Check what can be checked beforehand, then profile; a policy without plans."""
        is_main = self.session.sharing.processes.is_main
        with locked(path) if path is not None and is_main else nullcontext():
            self._check()
        known = profile_runs(
            self.session,
            self.runs.calibration,
            path=path,
            keep=self.runs.refitted,
            provenance=provenance,
        )
        known = replace(known, plans=())
        if not self.runs.disjoint:
            return known
        return hold_out(known, {run.prompt for run in self.runs.heldout})

    def trajectory(self, policy: Policy) -> Policy:
        """The policy with a validated plan for every target."""
        if self.runs.refitted:
            policy = measure_fits(self.session, policy, self.runs.refitted)
        else:
            self.session.progress("solve")
            policy = with_frontier(policy)
        if self.targets.min_psnr is not None:
            return self._reach(policy, self.targets.min_psnr)
        budgets = self.targets.check(profile_of(policy).num_steps)
        return self._validated(policy, [self._plan(policy, budget) for budget in budgets])

    def paper(self, policy: Policy) -> Policy:
        """The same with plans of the paper's method."""
        budgets: Sequence[int | None] = self.targets.check(profile_of(policy).num_steps) or [None]
        return self._validated(policy, [self._paper_plan(policy, budget) for budget in budgets])

    def _paper_plan(self, policy: Policy, budget: int | None) -> FittedPlan:
        threshold, options = self.targets.threshold, self.options
        if self.runs.refitted:
            return calibrate_paper(
                self.session,
                policy,
                self.runs.refitted,
                budget=budget,
                threshold=threshold,
                options=options,
            )
        return solve(
            policy, method="paper", compute_steps=budget, threshold=threshold, **vars(options)
        ).default

    def _plan(self, policy: Policy, budget: int) -> FittedPlan:
        if self.runs.refitted:
            reference = self.session.reference(self.runs.refitted)
            return refit_budget(self.session, policy, reference, budget)
        return solve(policy, compute_steps=budget).plans[-1]

    def _validated(self, policy: Policy, plans: Sequence[FittedPlan]) -> Policy:
        found = list(plans)
        if self.runs.heldout:
            found = validate(self.session, policy, plans, self.runs.heldout)
        calls = {"network calls": str(self.session.evaluations)}
        return replace(policy, plans=tuple(found), provenance={**policy.provenance, **calls})

    def _reach(self, policy: Policy, psnr: float) -> Policy:
        """The fewest computed steps that reach a PSNR on held-out prompts, in a few tries.

        A try that misses lowers all predictions by what it lacked. If none reaches the PSNR, the
        plan that came nearest is kept.
        """
        steps = profile_of(policy).num_steps
        tried: list[FittedPlan] = []
        while len(tried) < TRIES:
            budget = _predicted_budget(policy, psnr, above=_computed(tried))
            if budget is None:
                break
            plan = replace(self._plan(policy, budget), target_psnr=psnr)
            validated = self._validated(policy, [plan])
            policy, tried = replace(validated, plans=()), [*tried, *validated.plans]
            measured = _measured_psnr(tried[-1])
            if measured >= psnr:
                return replace(policy, plans=(tried[-1],))
            error = tried[-1].predicted_error
            assert error is not None
            policy = replace(policy, unit_psnr=measured_unit(measured, error))
        if not tried:
            raise ValueError(f"a run of {steps} steps leaves none to reuse")
        return replace(policy, plans=(max(tried, key=_measured_psnr),))


def _computed(plans: Sequence[FittedPlan]) -> int:
    return max((len(plan.compute_steps) for plan in plans), default=0)


def _measured_psnr(plan: FittedPlan) -> float:
    row = plan.measured
    return -math.inf if row is None else row.psnr


def _predicted_budget(policy: Policy, psnr: float, *, above: int) -> int | None:
    """The fewest computed steps, more than ``above``, that are predicted to reach a PSNR.

    If none are, those with the lowest predicted error; None if there are none above ``above``.
    Computing every step is no plan and is left out.
    """
    solver, steps = PlanSolver(policy), profile_of(policy).num_steps
    curve = solver.curve(profile_of(policy).schedule)
    found = {n: error for n, error in sorted(curve.items()) if above < n < steps}
    for computed, error in found.items():
        if solver.psnr(error) >= psnr:
            return computed
    return min(found, key=found.__getitem__, default=None)


def _last_quarter(prompts: Sequence[str]) -> list[str]:
    """The last quarter of the different prompts, at least one."""
    different = list(dict.fromkeys(prompts))
    return different[-max(1, len(different) // 4) :]
