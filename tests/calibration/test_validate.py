"""Validation on scripted results and times, and the verdict from measured rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.session import Generated, Session
from ertacache.calibration.solve import solve
from ertacache.calibration.validate import (
    Variant,
    Verdict,
    measure,
    missed_target,
    plain_reuse,
    recommend,
    validate,
    variants_of,
)
from ertacache.core.plans import PaperPlan, Target
from ertacache.formats.fitted import FittedPlan, ValidationRow
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from tests.calibration.conftest import CALL, HELDOUT, PROMPTS, TINY_RUNS, TINY_STEPS


@pytest.fixture(scope="module")
def policy(tiny_known: Policy) -> Policy:
    return solve(tiny_known, compute_steps=3)


@pytest.fixture(scope="module")
def plan(policy: Policy) -> FittedPlan:
    return policy.default


class Scripted(Session):
    """A session whose results are grey images, and whose times are those of a script."""

    def __init__(self, levels: Sequence[float], seconds: Sequence[float], **more: Any) -> None:
        scheduler = SimpleNamespace(config=SimpleNamespace(timestep_spacing="trailing"))
        super().__init__(SimpleNamespace(scheduler=scheduler), **more)  # type: ignore[arg-type]
        self._levels, self._seconds = iter(levels), iter(seconds)
        self.made: list[tuple[int, Policy | None, int, Target | None]] = []

    def generate(
        self, runs: Sequence[ProfiledPrompt], policy: Policy | None = None, **changes: Any
    ) -> Generated:
        steps = changes["num_inference_steps"]
        self.made.append((len(runs), policy, steps, changes["target"]))
        image = torch.full((len(runs), 3, 4, 4), next(self._levels))
        return Generated(image, next(self._seconds), None)


def test_the_alternatives_need_no_calibration(policy: Policy, plan: FittedPlan) -> None:
    full, ours, plain, fewer = variants_of(policy, {"policy": plan})
    assert (full.name, full.policy, full.num_inference_steps) == ("full", None, TINY_STEPS)
    assert ours.policy is not None
    assert ours.policy.plans == (plan,)
    assert ours.policy.profile is None  # the plan and nothing else
    assert ours.computed_steps == 3
    assert (fewer.policy, fewer.num_inference_steps, fewer.computed_steps) == (None, 3, 3)
    assert plain.policy is not None
    reused = plain.policy.default
    assert reused.compute_steps == (0, 4, 7)
    assert isinstance(reused.plan, PaperPlan)
    assert reused.plan.reuse == "velocity"
    assert reused.plan.gain is None
    assert torch.equal(reused.plan.sigmas, plan.sigmas)
    assert plain.policy.fingerprint == policy.fingerprint


def test_alternatives_stand_once_for_each_number_of_computed_steps(
    policy: Policy, plan: FittedPlan
) -> None:
    other = solve(policy, compute_steps=2).plans[-1]
    found = variants_of(policy, {"a": plan, "b": plan, "c": other})
    names = ["full", "a", "b", "c", "plain reuse", "fewer steps", "plain reuse", "fewer steps"]
    assert [variant.name for variant in found] == names
    assert [variant.computed_steps for variant in found] == [8, 3, 3, 2, 3, 3, 2, 2]
    assert plain_reuse(other).compute_steps == (0, 7)  # the first and the last step at least


def test_a_pipeline_may_take_fewer_steps_than_it_is_asked_for(
    policy: Policy, plan: FittedPlan
) -> None:
    """As in image to image: the eight steps of the plan are half of sixteen."""
    found = variants_of(policy, {"policy": plan}, num_inference_steps=16)
    assert [variant.num_inference_steps for variant in found] == [16, 16, 16, 6]
    assert [variant.computed_steps for variant in found] == [8, 3, 3, 3]


def test_variants_take_turns_on_every_batch(policy: Policy) -> None:
    twice = Target(speedup=2.0)
    variants = [Variant("full", 8, None, 8), Variant("policy", 3, policy, 8, twice)]
    session = Scripted([0.5, 0.5, 0.5, 0.6], [4.0, 1.0, 8.0, 2.0], batch_size=2)
    seen: list[tuple[str, int]] = []
    measure(
        session,
        variants,
        TINY_RUNS[:3],
        observe=lambda variant, batch, result: seen.append((variant.name, len(result))),
    )
    assert session.made == [
        (2, None, 8, None),
        (2, policy, 8, twice),
        (1, None, 8, None),
        (1, policy, 8, twice),
    ]
    assert seen == [("full", 2), ("policy", 2), ("full", 1), ("policy", 1)]
    full, ours = variants
    assert full.decibels == [100.0] * 3  # identical images count for this much in a mean
    assert ours.decibels == pytest.approx([100.0, 100.0, 20.0], abs=1e-3)
    assert (full.seconds, ours.seconds) == ([4.0, 8.0], [1.0, 2.0])


def test_rows_are_means_of_decibels_and_medians_of_times(policy: Policy, plan: FittedPlan) -> None:
    levels = [0.5, 0.6, 0.6, 0.6, 0.5, 0.51, 0.6, 0.6, 0.5, 0.6, 0.6, 0.6]
    seconds = [4.0, 1.0, 2.0, 2.0, 4.0, 2.0, 2.0, 4.0, 100.0, 90.0, 2.0, 3.0]
    (found,) = validate(Scripted(levels, seconds), policy, [plan], TINY_RUNS[:3])
    assert found.plan is plan.plan
    ours, plain, fewer = found.validation
    assert found.measured == ours
    assert (ours.method, ours.computed_steps, ours.prompts) == ("policy", 3, 3)
    assert ours.psnr == pytest.approx((20 + 40 + 20) / 3, abs=1e-3)
    assert (ours.speedup, plain.speedup, fewer.speedup) == (2.0, 2.0, 4 / 3)


def test_each_plan_has_its_own_rows(policy: Policy, plan: FittedPlan) -> None:
    """All run in one turn: the full run once, the alternatives once per number of steps."""
    other = solve(policy, compute_steps=2).plans[-1]
    levels = [0.5, 0.51, 0.6, 0.4, 0.4, 0.3, 0.3]
    session = Scripted(levels, [8.0, 4.0, 2.0, 4.0, 4.0, 2.0, 2.0])
    three, two = validate(session, policy, [plan, other], TINY_RUNS[:1])
    assert len(session.made) == 7
    for found, computed, speedup in ((three, 3, 2.0), (two, 2, 4.0)):
        methods = [row.method for row in found.validation]
        assert methods == ["policy", "plain reuse", "fewer steps"]
        assert {row.computed_steps for row in found.validation} == {computed}
        assert {row.speedup for row in found.validation} == {speedup}
    assert three.validation[0].psnr == pytest.approx(40, abs=1e-3)
    assert two.validation[0].psnr == pytest.approx(20, abs=1e-3)


def row(method: str, psnr: float, speedup: float = 2.0) -> ValidationRow:
    return ValidationRow(method, 10, psnr=psnr, speedup=speedup, prompts=4)


def test_a_policy_that_is_recommended() -> None:
    verdict = recommend([row("policy", 40.0), row("fewer steps", 30.0)])
    assert verdict == Verdict(True, "2.00x faster, 40.0 dB PSNR to the full run")
    assert str(verdict) == "recommended: 2.00x faster, 40.0 dB PSNR to the full run"
    assert recommend([row("policy", 40.0)]).recommended
    same = recommend([row("policy", math.inf), row("fewer steps", math.inf)])
    assert str(same) == "recommended: 2.00x faster, identical to the full run"


def test_a_policy_that_is_not_recommended() -> None:
    slow = recommend([row("policy", 40.0, speedup=1.05), row("fewer steps", 30.0)])
    assert not slow.recommended
    assert str(slow) == "not recommended: the policy is only 1.05x faster than the full run"
    worse = recommend([row("policy", 29.0), row("plain reuse", 28.0), row("fewer steps", 30.0)])
    assert not worse.recommended
    assert str(worse) == (
        "not recommended: fewer steps, which needs no calibration, is closer to the full run, "
        "30.0 dB against 29.0"
    )
    near = recommend([row("policy", 32.9), row("plain reuse", 30.0), row("fewer steps", 28.0)])
    assert not near.recommended
    assert "plain reuse, which needs no calibration, is nearly as close" in near.reason
    other = recommend([row("policy", 19.9), row("fewer steps", 15.0)])
    assert not other.recommended
    assert str(other).startswith(
        "not recommended: 10 computed steps give another image, 19.9 dB to the full run at 2.00x"
    )


def test_a_missed_target_is_reported(plan: FittedPlan) -> None:
    measured = replace(plan, validation=(replace(row("policy", 39.96), computed_steps=3),))
    sentence = "target missed: 41.0 dB asked for, 40.0 dB measured"
    assert missed_target(replace(measured, target_psnr=41.0)) == sentence
    assert missed_target(replace(measured, target_psnr=39.96)) is None
    assert missed_target(measured) is None  # another target
    assert missed_target(replace(plan, target_psnr=41.0)) is None  # not measured


@pytest.mark.parametrize("steps", [4, 8])
def test_a_few_steps_are_not_worth_it(
    pipe: Any, steps: int, clock: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a distilled model, whose steps all differ. Only the network takes time."""

    def distilled(*, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        clock()
        return (6 * torch.sin(1000 * hidden_states),)

    monkeypatch.setattr(pipe.transformer, "forward", distilled)
    call = CALL | {"num_inference_steps": steps}
    policy = calibrate(pipe, PROMPTS[:3], heldout=HELDOUT[:2], speedup=2.0, batch_size=3, **call)
    rows = policy.default.validation
    measured = rows[0]
    assert measured.psnr < 16
    assert measured.speedup == 2.0
    verdict = recommend(rows)
    assert not verdict.recommended
    figure = re.escape(f"{measured.psnr:.1f}")
    assert re.match(
        rf"not recommended: .*(another image, {figure} dB|against {figure})", str(verdict)
    )


def test_a_result_with_nan_is_the_worst_there_is() -> None:
    variants = [Variant("full", 8, None, 8), Variant("policy", 3, None, 8)]
    measure(Scripted([0.5, math.nan], [1.0, 1.0]), variants, TINY_RUNS[:1])
    assert variants[1].decibels == [0.0]


def test_a_full_run_with_nan_is_reported_with_a_remedy() -> None:
    session = Scripted([math.nan], [1.0])
    with pytest.raises(ValueError, match=r"full run decodes to NaN .* in float32 or bfloat16"):
        measure(session, [Variant("full", 8, None, 8)], TINY_RUNS[:1])


def test_a_call_with_its_own_noise_levels_has_no_fewer_steps(
    policy: Policy, plan: FittedPlan
) -> None:
    """It would be the full run under another name."""
    for name, value in (("sigmas", (1.0, 0.5)), ("timesteps", (900, 400)), ("sigmas", None)):
        session = Scripted([0.5] * 4, [1.0] * 4, call={name: value})
        (found,) = validate(session, policy, [plan], TINY_RUNS[:1])
        fewer = ["fewer steps"] if value is None else []
        assert [row.method for row in found.validation] == ["policy", "plain reuse", *fewer]
