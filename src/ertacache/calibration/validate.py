"""Validation: a policy against the full run, plain reuse and fewer steps, on held-out prompts.

The variants take turns on every batch, so that a slow moment of the machine affects all of them;
times are medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from ertacache.calibration.session import Session
from ertacache.core.plans import PaperPlan, uniform_schedule
from ertacache.formats.policy import OWN_ROW, Policy, ValidationRow
from ertacache.formats.profile import ProfiledPrompt
from ertacache.metrics import IDENTICAL, psnr

__all__ = [
    "Variant",
    "Verdict",
    "measure",
    "missed_target",
    "plain_reuse",
    "recommend",
    "validate",
    "variants_of",
]

WORTHWHILE = 3.0  # dB ahead of what needs no calibration: half of the squared error
ANOTHER_IMAGE = 20.0  # dB below which a result is no longer the image of the full run
FASTER = 1.1  # least measured speed-up that is worth a policy


@dataclass
class Variant:
    """A sampling configuration and its measurements.

    Attributes:
        name: as tables show it.
        computed_steps: steps on which the network is evaluated.
        policy: what is attached; None for the pipeline as it is.
        num_inference_steps: steps of the run.
        seconds: time of every batch.
        decibels: PSNR of every prompt to the full run.
    """

    name: str
    computed_steps: int
    policy: Policy | None
    num_inference_steps: int
    seconds: list[float] = field(default_factory=list)
    decibels: list[float] = field(default_factory=list)


def plain_reuse(policy: Policy) -> Policy:
    """The same number of computed steps, evenly spaced, the last output reused as it is."""
    steps = uniform_schedule(policy.num_steps, max(2, len(policy.compute_steps)))
    plan = PaperPlan(steps, "velocity", policy.sigmas)
    return Policy(plan, policy.sigmas, fingerprint=policy.fingerprint)


def variants_of(policies: dict[str, Policy]) -> list[Variant]:
    """The full run, each policy, and for each number of computed steps the two alternatives."""
    first = next(iter(policies.values()))
    variants = [Variant("full", first.num_steps, None, first.num_steps)]
    for name, policy in policies.items():
        variants.append(Variant(name, len(policy.compute_steps), policy, policy.num_steps))
    for policy in {len(p.compute_steps): p for p in policies.values()}.values():
        computed = len(policy.compute_steps)
        plain = plain_reuse(policy)
        variants.append(Variant("plain reuse", len(plain.compute_steps), plain, policy.num_steps))
        variants.append(Variant("fewer steps", computed, None, computed))
    return variants


def validate(
    session: Session, policy: Policy, runs: Sequence[ProfiledPrompt]
) -> tuple[ValidationRow, ...]:
    """Measure a policy, plain reuse and fewer steps against the full run on held-out prompts."""
    variants = variants_of({OWN_ROW: policy})
    measure(session, variants, runs)
    full = median(variants[0].seconds)
    return tuple(
        ValidationRow(
            method=variant.name,
            computed_steps=variant.computed_steps,
            psnr=sum(variant.decibels) / len(variant.decibels),
            speedup=full / median(variant.seconds),
            prompts=len(runs),
        )
        for variant in variants[1:]
    )


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
    done = 0
    for batch in batches:
        full: Tensor | None = None
        for variant in variants:
            steps = variant.num_inference_steps
            made = session.generate(batch, variant.policy, num_inference_steps=steps)
            full = made.results if full is None else full
            variant.seconds.append(made.seconds)
            variant.decibels += psnr(made.results, full).clamp_max(IDENTICAL).tolist()
            if observe is not None:
                observe(variant, batch, made.results)
            done += 1
            progress(done, len(batches) * len(variants))


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

    Example:
        >>> ours = ValidationRow("policy", 10, psnr=46.5, speedup=2.9, prompts=24)
        >>> print(recommend([ours, ValidationRow("fewer steps", 10, 31.0, 2.9, 24)]))
        recommended: 2.90x faster, 46.5 dB PSNR to the full run
        >>> print(recommend([ours, ValidationRow("fewer steps", 10, 45.0, 2.9, 24)]))
        not recommended: fewer steps, which needs no calibration, is nearly as close to the full \
run, 45.0 dB against 46.5
    """
    policy, *others = rows
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


def missed_target(policy: Policy) -> str | None:
    """The sentence that a policy misses its target PSNR; None if it does not, or has none."""
    row, target = policy.measured, policy.target_psnr
    if target is None or row is None or row.psnr >= target:
        return None
    return f"target missed: {target:.1f} dB asked for, {row.psnr:.1f} dB measured"
