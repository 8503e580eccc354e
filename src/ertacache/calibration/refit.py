"""The closed-loop refit: solved plans, fitted again on the latents that a run really reaches.

Runs the pipeline on calibration prompts, all of them in lockstep. A refit is kept only if it helps
prompts that it was not fitted on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ertacache.calibration.profile import check_continued
from ertacache.calibration.session import HELDOUT_SEED, Session, Stage, number_runs
from ertacache.calibration.solve import Target, make_policy, solve
from ertacache.calibration.validate import validate
from ertacache.core.frontier import spread_schedule
from ertacache.core.paper import reuse_distances, sweep_profile
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import RefitStepper, typical_distance
from ertacache.formats.container import read_kind
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.private_api import Pipeline

__all__ = ["REFIT_PROMPTS", "check_refit_prompts", "refit", "refit_policy"]

REFIT_PROMPTS = 32  # by default: with half as many, out-of-distribution prompts diverge
FITS = (
    Fit(history=4),
    Fit(history=4, ridge=1e-2),
    Fit(history=3),
    Fit(history=5, ridge=1e-4),
)
"""Candidate fits: strong ridges suit few computed steps, weak ones and long histories many."""


def refit(
    pipe: Pipeline,
    source: Policy | Profile | str | os.PathLike[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    heldout: Sequence[str] | None = None,
    batch_size: int = 1,
    refit_prompts: int = REFIT_PROMPTS,
    stage: Stage | None = None,
    **call: Any,
) -> Policy:
    """Refit a policy in closed loop, or solve and refit another budget of its profile.

    The prompts are those of the profile, with their seeds.

    Args:
        pipe: the pipeline that was profiled, nothing attached.
        source: a policy that carries its profile, a profile, or the path of either file.
        speedup: at least this many times fewer computed steps than steps; by default the budget of
            the policy.
        compute_steps: this many computed steps, in place of a speed-up.
        heldout: prompts to validate on; None does not validate.
        batch_size: prompts per call of the network.
        refit_prompts: calibration prompts to refit on; their latents are held in memory.
        stage: called with the name of every stage; returns what is called with its progress.
        **call: arguments of the pipeline, as they were when it was profiled.

    Returns:
        The refitted policy; it carries the profile.
    """
    if not isinstance(source, Policy | Profile):
        source = Policy.load(source) if read_kind(source) == "policy" else Profile.load(source)
    profile = source.profile if isinstance(source, Policy) else source
    if profile is None:
        raise ValueError("the policy carries no profile to refit: calibrate again")
    if speedup is None and compute_steps is None and isinstance(source, Policy):
        compute_steps = len(source.compute_steps)
    target = Target(speedup=speedup, compute_steps=compute_steps)
    call = {"num_inference_steps": profile.num_steps} | call
    check_continued(profile, pipe, call)
    session = Session(pipe, call, batch_size=batch_size, stage=stage)
    solved = solve(profile, compute_steps=target.budget(profile.num_steps))
    policy = refit_policy(
        session, solved, profile, profile.prompts[: check_refit_prompts(refit_prompts)]
    )
    if heldout is None:
        return policy
    return replace(policy, validation=validate(session, policy, number_runs(heldout, HELDOUT_SEED)))


def check_refit_prompts(count: int) -> int:
    """Return a number of prompts to refit on; raise if it is not positive."""
    if count < 1:
        raise ValueError(f"refit_prompts must be at least 1, got {count}")
    return count


def refit_policy(
    session: Session, policy: Policy, profile: Profile, runs: Sequence[ProfiledPrompt]
) -> Policy:
    """Refit a solved policy, if that helps prompts that it was not fitted on.

    Candidates are the policy's own compute schedule, the paper's and the uniform one with the first
    of ``FITS``; then the best of them with the other fits; and the policy as it is. Each is fitted
    on one half of the prompts and evaluated on the other by its typical distance; the best is then
    fitted on all of them.

    Args:
        session: the pipeline.
        policy: the policy, as solved.
        profile: what it was solved from.
        runs: calibration prompts, all of them in the profile.
    """
    half = len(runs) // 2
    if half == 0:
        return policy
    trials = _Trials(session, profile, tuple(runs), session.reference(runs))
    schedules = _schedules(policy, profile)
    total = len(schedules) + len(FITS) + 1  # with the policy as it is, and the last refit
    progress = session.progress("refit")
    unrefitted = trials.open_loop_error(policy.compute_steps)
    errors: dict[tuple[tuple[int, ...], Fit], float] = {}

    def attempt(steps: tuple[int, ...], fit: Fit) -> None:
        progress(len(errors) + 1, total)
        _, errors[steps, fit] = trials.refit(steps, fit, fitted=half)

    for steps in schedules:
        attempt(steps, FITS[0])
    best_steps, _ = min(errors, key=errors.__getitem__)
    for fit in FITS[1:]:
        attempt(best_steps, fit)
    best = min(errors, key=errors.__getitem__)
    if errors[best] < unrefitted:
        progress(total - 1, total)
        plan, _ = trials.refit(*best)
        policy = replace(policy, plan=plan)
    progress(total, total)
    return policy


def _schedules(policy: Policy, profile: Profile) -> list[tuple[int, ...]]:
    """The policy's compute schedule, the paper's and the uniform one, each once."""
    budget, pinned = len(policy.compute_steps), {0, *profile.expert_steps}
    found = sweep_profile(*reuse_distances(profile.statistics, "residual"))
    paper = next((steps for _, steps in sorted(found.items()) if len(steps) == budget), ())
    uniform = spread_schedule(policy.num_steps, budget, pinned)
    # Thresholds skip some budgets, and the paper's schedule does not pin a later network's step.
    others = [steps for steps in (paper, uniform) if pinned <= set(steps)]
    return list(dict.fromkeys([policy.compute_steps, *others]))


@dataclass(frozen=True, eq=False)
class _Trials:
    """Candidates are run here, on the calibration prompts and against their reference latents."""

    session: Session
    profile: Profile
    runs: tuple[ProfiledPrompt, ...]
    latents: tuple[Tensor, ...]

    def refit(
        self, steps: tuple[int, ...], fit: Fit, *, fitted: int | None = None
    ) -> tuple[TrajectoryPlan, float]:
        """Fit a compute schedule on the first prompts, or all; its plan and its error."""
        stepper = RefitStepper(
            self.latents,
            compute_steps=steps,
            nominal=self.profile.nominal,
            fit=fit,
            fitted=fitted,
        )
        self.session.lockstep(self.runs, make_policy(self.profile, stepper.plan()), stepper)
        return stepper.plan(), stepper.error

    def open_loop_error(self, steps: tuple[int, ...]) -> float:
        """Typical distance of the second half of the prompts under a plan from the first half."""
        profile, half = self.profile, len(self.runs) // 2
        (plan,) = fit_plans(
            profile.statistics.select([profile.prompts.index(run) for run in self.runs[:half]]),
            profile.nominal,
            schedules=[steps],
            fit=Fit(),
        )
        final = self.session.lockstep(self.runs[half:], make_policy(profile, plan))
        return typical_distance(final, self.latents[-1][half:].to(final))
