"""Calibration from end to end, and up to three budgets for a target PSNR."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration.calibrate import TRIES, calibrate
from ertacache.calibration.session import Session
from ertacache.calibration.solve import choose_point, predicted_psnr, solve_profile
from ertacache.calibration.validate import Variant, missed_target
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile
from tests.calibration.conftest import (
    CALL,
    HELDOUT,
    PROMPTS,
    STEPS,
    TINY_PROMPTS,
    TINY_STEPS,
    tiny_call,
)

UNIT = 20.0


def test_from_end_to_end(pipe: Any, tmp_path: Path, clock: Callable[[], None]) -> None:
    stages: list[str] = []

    def stage(name: str) -> None:
        stages.append(name)

    noise = torch.Generator().manual_seed(3)
    before = pipe(HELDOUT[0], generator=noise, output_type="pt", **CALL)[0]
    hook = pipe.transformer.proj_out.register_forward_hook(clock)
    policy = calibrate(
        pipe,
        PROMPTS,
        heldout=HELDOUT,
        speedup=2.0,
        batch_size=4,
        refit_prompts=2,
        stage=stage,
        profile_path=tmp_path / "profile.safetensors",
        **CALL,
    )
    hook.remove()
    after = pipe(HELDOUT[0], generator=noise.manual_seed(3), output_type="pt", **CALL)[0]
    assert torch.equal(before, after)  # nothing of ours is left on the pipeline
    assert stages == ["profile", "solve", "refit", "validate"]
    ours, plain, fewer = policy.validation
    assert [row.method for row in policy.validation] == ["policy", "plain reuse", "fewer steps"]
    assert {row.computed_steps for row in policy.validation} == {STEPS // 2}
    assert {row.speedup for row in policy.validation} == {2.0}  # only the network takes time
    assert ours.psnr > max(plain.psnr, fewer.psnr) + 3
    assert ours.prompts == len(HELDOUT)
    assert policy.measured == ours
    policy.save(tmp_path / "policy.safetensors")
    assert Policy.load(tmp_path / "policy.safetensors").validation == policy.validation
    assert Profile.load(tmp_path / "profile.safetensors").num_prompts == len(PROMPTS)


def test_a_quarter_is_held_out_by_default(tiny: Any) -> None:
    short = tiny_call() | {"num_inference_steps": 4}
    call = {"compute_steps": 2, "refit": False, "batch_size": 4} | short
    policy = calibrate(tiny, TINY_PROMPTS[:4], **call)
    assert policy.profile is not None
    assert policy.profile.num_prompts == 3
    assert policy.validation[0].prompts == 1
    alone = calibrate(tiny, TINY_PROMPTS[:1], **call)  # another seed is all there is to hold out
    assert alone.profile is not None
    assert (alone.profile.num_prompts, alone.validation[0].prompts) == (1, 1)


def test_arguments_are_checked_before_any_run(tiny: Any) -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        calibrate(tiny, TINY_PROMPTS, speedup=2.0, threshold=0.1, **tiny_call())
    with pytest.raises(ValueError, match="predicts no error"):
        calibrate(tiny, TINY_PROMPTS, min_psnr=40.0, method="paper", **tiny_call())
    with pytest.raises(ValueError, match="list of at least one"):
        calibrate(tiny, [], speedup=2.0, **tiny_call())


def test_a_psnr_is_reached_and_measured(pipe: Any) -> None:
    call = CALL | {"num_inference_steps": 10, "batch_size": 4, "refit": False}
    policy = calibrate(pipe, PROMPTS[:2], heldout=HELDOUT[:1], min_psnr=40.0, **call)
    assert len(policy.compute_steps) < 10
    assert policy.validation[0].psnr >= 40
    assert missed_target(policy) is None
    assert policy.target_psnr == 40.0
    assert policy.profile is not None
    # With what was measured, solving alone comes to the same steps, if the first try was enough.
    unit = float(policy.provenance["unit psnr"])
    again = choose_point(solve_profile(policy.profile), 40.0, unit=unit)
    assert again is not None
    assert again.computed <= len(policy.compute_steps)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Measurements that are some decibels short of the prediction."""

    def script(short: float) -> list[int]:
        tried: list[int] = []

        def measure(session: Session, variants: list[Variant], *_: Any, **__: Any) -> None:
            policy = variants[1].policy
            assert policy is not None
            assert policy.predicted_error is not None
            variants[1].decibels = [predicted_psnr(policy.predicted_error, UNIT)]

        def validate(session: Session, policy: Policy, *_: Any) -> tuple[ValidationRow, ...]:
            tried.append(len(policy.compute_steps))
            assert policy.predicted_error is not None
            psnr = predicted_psnr(policy.predicted_error, UNIT) - short
            return (ValidationRow("policy", tried[-1], psnr=psnr, speedup=2.0, prompts=1),)

        monkeypatch.setattr("ertacache.calibration.calibrate.measure", measure)
        monkeypatch.setattr("ertacache.calibration.calibrate.validate", validate)
        return tried

    return script


@pytest.fixture(scope="module")
def profile_path(tiny_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile as a file, so that no calibration here runs the pipeline."""
    path = tmp_path_factory.mktemp("profile") / "profile.safetensors"
    tiny_profile.save(path)
    return path


@pytest.fixture
def reach(tiny: Any, profile_path: Path) -> Callable[[float], Policy]:
    def calibrated(psnr: float) -> Policy:
        call = tiny_call() | {"refit": False, "profile_path": profile_path}
        return calibrate(tiny, TINY_PROMPTS, heldout=TINY_PROMPTS[:1], min_psnr=psnr, **call)

    return calibrated


@pytest.fixture(scope="module")
def predicted(tiny_profile: Profile) -> list[float]:
    """The decibels that are predicted for two to seven computed steps."""
    points = [p for p in solve_profile(tiny_profile).points if p.computed < TINY_STEPS]
    return [predicted_psnr(point.predicted_error, UNIT) for point in points]


def test_a_try_that_misses_is_followed_by_another(
    scripted: Any, reach: Callable[[float], Policy], predicted: list[float]
) -> None:
    for short in (0.0, 0.5):
        tried = scripted(short)
        policy = reach(sorted(predicted)[2])
        assert missed_target(policy) is None
        assert tried == sorted(set(tried))
        assert (len(tried) == 1) == (short == 0.0)
        assert policy.validation[0].computed_steps == tried[-1]


def test_a_psnr_out_of_reach_is_reported(
    scripted: Any, reach: Callable[[float], Policy], predicted: list[float]
) -> None:
    tried = scripted(0.0)
    policy = reach(200.0)
    assert 1 <= len(tried) <= TRIES
    sentence = missed_target(policy)
    assert sentence is not None
    assert sentence.startswith("target missed: 200.0 dB asked for, ")
    assert policy.validation[0].psnr == max(predicted)
