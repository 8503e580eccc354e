"""Validation: a policy against the full run, plain reuse and fewer steps, on held-out prompts.

Whether prompts are held out is not a matter of trust: runs of them are left out of the profile, and
what is measured on prompts that are still in it is marked.

The variants take turns on every batch, so that a slow moment of the machine affects all of them;
times are medians.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from ertacache.calibration.session import Session
from ertacache.calibration.sharing import Record
from ertacache.core.plans import PaperPlan, Target, uniform_schedule
from ertacache.formats.fitted import OWN_ROW, FittedPlan, ValidationRow
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.solve import profile_of
from ertacache.integration.spacing import same_start
from ertacache.metrics import IDENTICAL, psnr

__all__ = [
    "NOT_HELD_OUT",
    "Variant",
    "Verdict",
    "hold_out",
    "measure",
    "missed_target",
    "plain_reuse",
    "psnr_to_full",
    "recommend",
    "validate",
    "variants_of",
]

WORTHWHILE = 3.0  # dB ahead of what needs no calibration: half of the squared error
ANOTHER_IMAGE = 20.0  # dB below which a result is no longer the image of the full run
FEWER = "fewer steps"
FASTER = 1.1  # least measured speed-up that is worth a policy

NOT_HELD_OUT = (
    "the prompts to validate on are all that there is to calibrate on, so that they are used for "
    "both, with other seeds, and the measurements are marked as not held out: give more prompts"
)
_LOG = logging.getLogger("ertacache")


@dataclass
class Variant:
    """A sampling configuration and its measurements.

    Attributes:
        name: as tables show it.
        computed_steps: steps on which the network is evaluated.
        policy: what is attached; None for the pipeline as it is.
        num_inference_steps: what the pipeline is called with.
        target: of the policy; None takes its first plan.
        seconds: time of every batch.
        decibels: PSNR of every prompt to the full run.
        plan: the plan that the policy followed; None without one.
    """

    name: str
    computed_steps: int
    policy: Policy | None
    num_inference_steps: int
    target: Target | None = None
    seconds: list[float] = field(default_factory=list)
    decibels: list[float] = field(default_factory=list)
    plan: FittedPlan | None = None

    def facts(self) -> list[object]:
        """What identifies it among the parts of finished work."""
        policy = None if self.policy is None else hashlib.sha256(self.policy._to_bytes())
        return [self.num_inference_steps, policy and policy.hexdigest(), str(self.target)]


def plain_reuse(plan: FittedPlan) -> FittedPlan:
    """The same number of computed steps, evenly spaced, the last output reused as it is."""
    steps = uniform_schedule(plan.num_steps, max(2, len(plan.compute_steps)))
    return FittedPlan(PaperPlan(steps, "velocity", plan.sigmas), plan.sigmas)


def variants_of(
    policy: Policy, plans: Mapping[str, FittedPlan], *, num_inference_steps: int | None = None
) -> list[Variant]:
    """The full run, each plan, and for each number of computed steps the two alternatives.

    Args:
        policy: what the plans are of.
        plans: the plans by their names, all for runs of the same number of steps.
        num_inference_steps: what the pipeline is called with to run so many steps, if it is more,
            as in image to image.
    """
    steps = next(iter(plans.values())).num_steps
    asked = num_inference_steps or steps
    variants = [Variant("full", steps, None, asked)]
    for name, plan in plans.items():
        variants.append(Variant(name, len(plan.compute_steps), _only(policy, plan), asked))
    for plan in {len(p.compute_steps): p for p in plans.values()}.values():
        computed, plain = len(plan.compute_steps), plain_reuse(plan)
        variants.append(
            Variant("plain reuse", len(plain.compute_steps), _only(policy, plain), asked)
        )
        variants.append(Variant(FEWER, computed, None, round(asked * computed / steps)))
    return variants


def _only(policy: Policy, plan: FittedPlan) -> Policy:
    return Policy(policy.fingerprint, plans=(plan,))


def hold_out(policy: Policy, prompts: Collection[str]) -> Policy:
    """The policy without profiled runs of some prompts, so that plans can be measured on these.

    What was made from all runs, such as fits and plans, goes with them; it is reported in one line.
    The policy as it is if it has no such run, or nothing else to fit on, which is a warning.
    """
    profile, held = profile_of(policy), set(prompts)
    kept = [run for run in profile.runs if run.prompt not in held]
    left_out = profile.num_runs - len(kept)
    if left_out == 0:
        return policy
    if not kept:
        warnings.warn(NOT_HELD_OUT, stacklevel=2)
        return policy
    _LOG.info(
        "%d of %d profiled runs are of prompts to validate on, and are left out of the fit",
        left_out,
        profile.num_runs,
    )
    return Policy(policy.fingerprint, profile=profile.select(kept), provenance=policy.provenance)


def _prompts(runs: Sequence[ProfiledPrompt]) -> set[str]:
    return {run.prompt for run in runs}


def validate(
    session: Session, policy: Policy, plans: Sequence[FittedPlan], runs: Sequence[ProfiledPrompt]
) -> list[FittedPlan]:
    """Measure plans, plain reuse and fewer steps against the full run on held-out prompts.

    Args:
        session: the pipeline.
        policy: with the profile of all runs that the plans were fitted on.
        plans: the plans.
        runs: prompts and seeds; rows say whether a prompt of them is in the profile.

    Returns:
        The plans with their measurements.
    """
    heldout = not _prompts(runs) & _prompts(() if policy.profile is None else policy.profile.runs)
    names = [f"plan {place}" for place in range(len(plans))]
    variants = variants_of(
        policy,
        dict(zip(names, plans, strict=True)),
        num_inference_steps=session.call.get("num_inference_steps"),
    )
    if session.gives_schedule:  # such a call has these steps, whatever else it asks for
        variants = [variant for variant in variants if variant.name != FEWER]
    measure(session, variants, runs)
    full = median(variants[0].seconds)
    found = []
    for name, plan in zip(names, plans, strict=True):
        budgets = {len(plan.compute_steps), max(2, len(plan.compute_steps))}
        rows = [
            ValidationRow(
                method=OWN_ROW if variant.name == name else variant.name,
                computed_steps=variant.computed_steps,
                psnr=sum(variant.decibels) / len(variant.decibels),
                speedup=full / median(variant.seconds),
                prompts=len(runs),
                heldout=heldout,
            )
            for variant in variants[1:]
            if variant.name == name
            or (variant.name not in names and variant.computed_steps in budgets)
        ]
        found.append(replace(plan, validation=tuple(rows)))
    return found


def measure(
    session: Session,
    variants: Sequence[Variant],
    runs: Sequence[ProfiledPrompt],
    *,
    stage: str = "validate",
    observe: Callable[[Variant, Sequence[ProfiledPrompt], Tensor], None] | None = None,
) -> None:
    """Run all variants on all batches in turn and add their measurements.

    Args:
        session: the pipeline.
        variants: the full run first.
        runs: prompts and seeds.
        stage: name of the stage whose progress is reported.
        observe: receives every result.
    """
    batches, progress = session.batches(runs), session.progress(stage)
    total, done = len(batches) * len(variants), 0

    def run(batch: Sequence[ProfiledPrompt]) -> Record:
        full: Tensor | None = None
        seconds, found = [], []
        for place, variant in enumerate(variants, start=1):
            steps = variant.num_inference_steps
            # The full run itself begins where it begins.
            with same_start(session.pipe.scheduler, variants[0].num_inference_steps):
                made = session.generate(
                    batch, variant.policy, target=variant.target, num_inference_steps=steps
                )
            full = made.results if full is None else full
            variant.plan = made.plan
            seconds.append(made.seconds)
            found.append(psnr_to_full(made.results, full))
            if observe is not None:
                observe(variant, batch, made.results)
            progress(done + place, total)
        times = torch.tensor(seconds, dtype=torch.float64)
        return {"seconds": times, "decibels": torch.stack(found)}

    facts = [variant.facts() for variant in variants]
    for record in session.sharing.share(stage, batches, run, facts=facts):
        for place, variant in enumerate(variants):
            variant.seconds.append(float(record["seconds"][place]))
            variant.decibels += record["decibels"][place].tolist()
        done += len(variants)
        progress(done, total)


def psnr_to_full(results: Tensor, full: Tensor) -> Tensor:
    """PSNR of every result to that of the full run; 0 for one with NaN.

    Raises:
        ValueError: if a full run has NaN.

    Example:
        >>> found = psnr_to_full(torch.tensor([[0.5], [torch.nan]]), torch.tensor([[0.6], [0.5]]))
        >>> found.round().tolist()
        [20.0, 0.0]
    """
    if not bool(torch.isfinite(full).all()):
        raise ValueError(
            "the full run decodes to NaN or infinity, so that nothing can be compared with it: "
            "load the pipeline, or its autoencoder, in float32 or bfloat16"
        )
    return psnr(results, full).nan_to_num(nan=0.0).clamp_max(IDENTICAL)


@dataclass(frozen=True)
class Verdict:
    """Whether a policy is worth using, and why."""

    recommended: bool
    reason: str

    def __str__(self) -> str:
        """The verdict in one line."""
        return f"{'' if self.recommended else 'not '}recommended: {self.reason}"


def recommend(rows: Sequence[ValidationRow]) -> Verdict:
    """Whether the first of some measured rows is worth using; the others need no calibration.

    The reason says so if they were not measured on held-out prompts.

    Example:
        >>> ours = ValidationRow("policy", 10, psnr=46.5, speedup=2.9, prompts=24)
        >>> print(recommend([ours, ValidationRow("fewer steps", 10, 31.0, 2.9, 24)]))
        recommended: 2.90x faster, 46.5 dB PSNR to the full run
        >>> print(recommend([ours, ValidationRow("fewer steps", 10, 45.0, 2.9, 24)]))
        not recommended: fewer steps, which needs no calibration, is nearly as close to the full \
run, 45.0 dB against 46.5
    """
    found = _verdict(*rows)
    if rows[0].heldout:
        return found
    return replace(found, reason=f"{found.reason}; measured on {rows[0].measured_on}")


def _verdict(policy: ValidationRow, *others: ValidationRow) -> Verdict:
    if policy.speedup < FASTER:
        return Verdict(False, f"the policy is only {policy.speedup:.2f}x faster than the full run")
    best = max(others, key=lambda row: row.psnr, default=None)
    if best is not None and policy.psnr < best.psnr + WORTHWHILE and not math.isinf(policy.psnr):
        nearly = "closer" if policy.psnr < best.psnr else "nearly as close"
        return Verdict(
            False,
            f"{best.method}, which needs no calibration, is {nearly} to the full run, "
            f"{best.psnr:.1f} dB against {policy.psnr:.1f}",
        )
    if policy.psnr < ANOTHER_IMAGE:
        return Verdict(
            False,
            f"{policy.computed_steps} computed steps give another image, {policy.psnr:.1f} dB to "
            f"the full run at {policy.speedup:.2f}x its speed: compute more of them; a distilled "
            "model needs all of its few steps",
        )
    psnr = "identical" if math.isinf(policy.psnr) else f"{policy.psnr:.1f} dB PSNR"
    return Verdict(True, f"{policy.speedup:.2f}x faster, {psnr} to the full run")


def missed_target(plan: FittedPlan) -> str | None:
    """The sentence that a plan misses its target PSNR; None if it does not, or has none."""
    row, target = plan.measured, plan.target_psnr
    if target is None or row is None or row.psnr >= target:
        return None
    return f"target missed: {target:.1f} dB asked for, {row.psnr:.1f} dB measured"
