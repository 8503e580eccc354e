"""What a check measured: a policy on a changed pipeline, against what its file promises."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ertacache.formats.fitted import ValidationRow
from ertacache.formats.text import decibels

__all__ = ["Check", "CheckedPlan"]

NOTICED = 3.0  # dB: more than a few prompts differ by
LOST = 6.0  # dB: twice the error


@dataclass(frozen=True)
class CheckedPlan:
    """One plan as it was measured now, and as the file has it.

    Attributes:
        num_steps: sampling steps of the run.
        measured: what was measured now.
        expected: PSNR in dB that the file has for the plan; None if it has none.
        source: where that comes from: ``"measured"``, on held-out prompts of the calibration, or
            ``"predicted"``; None if there is none.
        note: what else may explain a loss; empty if nothing is known.

    Example:
        >>> now = ValidationRow("policy", 15, psnr=50.2, speedup=1.9, prompts=8)
        >>> plan = CheckedPlan(30, now, expected=64.1, source="measured")
        >>> round(plan.lost, 1)
        13.9
        >>> print(plan.recommendation)
        calibrate again on this pipeline: 50.2 dB, 13.9 dB below the 64.1 dB in the file
    """

    num_steps: int
    measured: ValidationRow
    expected: float | None
    source: str | None
    note: str = ""

    @property
    def lost(self) -> float | None:
        """Decibels below what the file has, negative above; None if it has nothing."""
        if self.expected is None:
            return None
        now = self.measured.psnr
        return 0.0 if now == self.expected else self.expected - now

    @property
    def failed(self) -> bool:
        """Whether it lost more than 6 dB."""
        return self.lost is not None and self.lost > LOST

    @property
    def recommendation(self) -> str:
        """What to do, and why, in one line."""
        now = decibels(self.measured.psnr)
        if self.measured.computed_steps == self.num_steps:
            return "calibrate on this pipeline: no step is reused, so nothing is faster"
        if self.expected is None or self.lost is None:
            return f"compare it yourself: {now}, and the file has no PSNR for this run"
        known = f"the {decibels(self.expected)} in the file"
        if self.lost <= NOTICED:
            close = "no worse than" if self.lost <= 0 else f"within {NOTICED:g} dB of"
            return f"keep the policy: {now}, {close} {known}"
        what = "usable, and a refit on this pipeline would help"
        if self.lost > LOST:
            what = "calibrate again on this pipeline"
        note = f"; {self.note}" if self.note else ""
        return f"{what}: {now}, {self.lost:.1f} dB below {known}{note}"

    def to_json(self) -> dict[str, object]:
        """All numbers, for a JSON file; None where they are infinite."""
        row = self.measured
        return {
            "computed_steps": row.computed_steps,
            "expected_psnr": _finite(self.expected),
            "failed": self.failed,
            "heldout": row.heldout,
            "lost_db": _finite(self.lost),
            "num_steps": self.num_steps,
            "prompts": row.prompts,
            "psnr": _finite(row.psnr),
            "recommendation": self.recommendation,
            "source": self.source,
            "speedup": row.speedup,
        }


@dataclass(frozen=True)
class Check:
    """What a policy lost on a pipeline.

    Attributes:
        plans: one for each speed-up that was run.
    """

    plans: tuple[CheckedPlan, ...]

    @property
    def failed(self) -> bool:
        """Whether a plan lost more than 6 dB."""
        return any(plan.failed for plan in self.plans)

    def __str__(self) -> str:
        """A line for every plan."""
        return "\n".join(
            f"{plan.measured.computed_steps} of {plan.num_steps} steps: {plan.recommendation}"
            for plan in self.plans
        )


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
