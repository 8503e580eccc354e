"""Does a policy hold on a pipeline that has changed: a LoRA, quantised weights, other guidance?

A few prompts are run in full and accelerated, both on the changed pipeline. The PSNR is compared
with the one in the policy file. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from ertacache.calibration.session import HELDOUT_SEED, Session, Stage, calibrated_steps
from ertacache.calibration.validate import Variant, measure
from ertacache.core.plans import Target
from ertacache.formats.checked import Check, CheckedPlan
from ertacache.formats.fitted import OWN_ROW, FittedPlan, ValidationRow
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.identity import fingerprint
from ertacache.integration.private_api import Pipeline
from ertacache.integration.solve import PlanSolver, predicted_psnr

__all__ = ["check"]


def check(
    policy: Policy,
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    speedup: float | Sequence[float] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    stage: Stage | None = None,
    **call: Any,
) -> Check:
    """Measure a policy on a pipeline, and compare with what its file says.

    Prompts of other difficulty differ by a few decibels, so take 8 or more, of the kind that the
    policy was calibrated for.

    Args:
        policy: the policy.
        pipe: the pipeline as it is to be used, with its LoRA, number type and so on.
        prompts: a few; those of the calibration are marked as not held out.
        speedup: one or several; by default those of the plans in the policy.
        seed: seed of the first prompt's noise; the others count up. As in the validation of
            ``calibrate``, whose seeds are kept apart from those of the calibrated runs.
        batch_size: prompts per call of the pipeline.
        stage: called with the name of every stage; returns what is called with its progress.
        **call: arguments of the pipeline, such as another guidance scale. Without
            ``num_inference_steps`` the calibrated number.

    Raises:
        PolicyError: if the policy is for another network.
        ValueError: if there is no prompt, or no plan and no speed-up.
    """
    session = Session(pipe, calibrated_steps(policy) | call, batch_size=batch_size, stage=stage)
    runs = session.number_runs(prompts, seed + HELDOUT_SEED)
    targets = _targets(policy, speedup)
    attach(pipe, policy, **vars(targets[0])).detach()  # refused before anything is run
    asked = session.call.get("num_inference_steps")
    if asked is None:
        raise ValueError("give num_inference_steps: the calibrated runs do not say what it was")
    full = Variant("full", 0, None, asked)
    variants = [Variant(OWN_ROW, 0, policy, asked, target) for target in targets]
    measure(session, [full, *variants], runs, stage="check")
    profiled = set() if policy.profile is None else {run.prompt for run in policy.profile.runs}
    heldout = not profiled & set(prompts)
    found = []
    for variant in variants:
        plan = variant.plan
        num_steps = len(pipe.scheduler.timesteps) if plan is None else plan.num_steps
        row = ValidationRow(
            OWN_ROW,
            num_steps if plan is None else len(plan.compute_steps),
            psnr=fmean(variant.decibels),
            speedup=median(full.seconds) / median(variant.seconds),
            prompts=len(runs),
            heldout=heldout,
        )
        found.append(CheckedPlan(num_steps, row, *_expected(policy, plan), _rounding(policy, pipe)))
    return Check(tuple(found))


def _rounding(policy: Policy, pipe: Pipeline) -> str:
    """That another number type may explain a loss; empty if it is the calibrated one."""
    was = policy.fingerprint
    now = fingerprint(pipe, latent_shape=was.latent_shape, guidance=was.guidance).dtype
    if now == was.dtype or now not in ("bfloat16", "float16"):
        return ""
    return (
        f"those are of {was.dtype}, and the rounding of {now}, which no policy can undo, may "
        "explain the difference"
    )


def _targets(policy: Policy, speedup: float | Sequence[float] | None) -> list[Target]:
    """What is run: the given speed-ups, or the plans of the policy, each once."""
    if speedup is None:
        policy.default  # noqa: B018  it raises if there is none
        others = [plan for plan in policy.plans[1:] if plan.method == "trajectory"]
        return list(dict.fromkeys([Target(), *(Target(speedup=p.speedup) for p in others)]))
    listed = [speedup] if isinstance(speedup, int | float) else list(speedup)
    if not listed:
        raise ValueError("give at least one speedup, or none for those of the policy")
    return list(dict.fromkeys(Target(speedup=each) for each in listed))


def _expected(policy: Policy, plan: FittedPlan | None) -> tuple[float | None, str | None]:
    """The PSNR that a policy file has for a plan: measured, else predicted."""
    if plan is None:
        return None, None
    if plan.measured is not None:
        return plan.measured.psnr, "measured"
    error = plan.predicted_error if plan.measured_error is None else plan.measured_error
    if error is None:
        return None, None
    if policy.unit_psnr is not None:
        return predicted_psnr(error, policy.unit_psnr), "predicted"
    return (None, None) if policy.profile is None else (PlanSolver(policy).psnr(error), "predicted")
