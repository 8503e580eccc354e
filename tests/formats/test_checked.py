"""What a check says: lost decibels, the recommendation, JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ertacache.formats.checked import Check, CheckedPlan
from ertacache.formats.fitted import ValidationRow


def checked(psnr: float, expected: float | None, computed: int = 10) -> CheckedPlan:
    row = ValidationRow("policy", computed, psnr=psnr, speedup=2.9, prompts=8)
    return CheckedPlan(30, row, expected, None if expected is None else "predicted")


@pytest.mark.parametrize(
    ("psnr", "expected", "words"),
    [
        (60.0, 58.0, "keep the policy: 60.0 dB, no worse than the 58.0 dB in the file"),
        (55.0, 58.0, "keep the policy: 55.0 dB, within 3 dB of the 58.0 dB in the file"),
        (54.0, 58.0, "usable, and a refit on this pipeline would help: 54.0 dB, 4.0 dB below"),
        (52.0, 58.0, "usable, and a refit on this pipeline would help: 52.0 dB, 6.0 dB below"),
        (51.9, 58.0, "calibrate again on this pipeline: 51.9 dB, 6.1 dB below the 58.0 dB in"),
        (51.9, None, "compare it yourself: 51.9 dB, and the file has no PSNR for this run"),
        (math.inf, math.inf, "keep the policy: identical, no worse than the identical in the file"),
    ],
)
def test_recommendations(psnr: float, expected: float | None, words: str) -> None:
    plan = checked(psnr, expected)
    assert plan.recommendation.startswith(words)
    failed = expected is not None and expected - psnr > 6
    assert plan.failed == Check((checked(60, 60), plan)).failed == failed
    assert str(Check((plan,))) == f"10 of 30 steps: {plan.recommendation}"


def test_a_note_stands_with_a_loss_only() -> None:
    lost = replace(checked(50.0, 60.0), note="it was rounded")
    assert lost.recommendation.endswith("below the 60.0 dB in the file; it was rounded")
    kept = replace(checked(60.0, 60.0), note="it was rounded")
    assert "rounded" not in kept.recommendation


def test_nothing_reused_is_no_success() -> None:
    plan = checked(math.inf, None, computed=30)
    assert plan.recommendation.startswith("calibrate on this pipeline: no step is reused")
    assert plan.lost is None


def test_json_has_no_infinities() -> None:
    for plan in (checked(math.inf, 40.0), checked(40.0, math.inf), checked(40.0, None)):
        found = json.loads(json.dumps(plan.to_json(), allow_nan=False))
        assert found["prompts"] == 8
        assert found["computed_steps"] == 10
    assert checked(math.inf, 40.0).to_json()["psnr"] is None
    assert checked(40.0, 45.5).to_json()["lost_db"] == 5.5
