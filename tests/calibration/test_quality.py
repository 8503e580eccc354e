"""A wished PSNR: predicted, tried, and told honestly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ertacache.calibration import calibrate, falls_short, procedure, solve
from ertacache.calibration.quality import (
    choose_point,
    error_of,
    guess_unit,
    measured_unit,
    predicted_psnr,
)
from ertacache.calibration.solving import solve_all
from ertacache.core.frontier import Frontier
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile
from tests.calibration.conftest import CALL, HELDOUT, PROMPTS, STEPS
from tests.integration.tiny import CASES

UNIT = 20.0


@pytest.fixture(scope="module")
def frontier(known: Profile) -> Frontier:
    return solve_all(known)


def test_an_error_half_as_large_is_six_decibels() -> None:
    gain = predicted_psnr(0.01, UNIT) - predicted_psnr(0.02, UNIT)
    assert gain == pytest.approx(20 * math.log10(2))
    assert error_of(predicted_psnr(0.03, UNIT), UNIT) == pytest.approx(0.03)
    assert measured_unit(predicted_psnr(0.03, UNIT), 0.03) == pytest.approx(UNIT)
    assert math.isfinite(predicted_psnr(0.0, UNIT))


def test_the_fewest_steps_that_are_expected_to_do(frontier: Frontier) -> None:
    wish = predicted_psnr(frontier.select(compute_steps=6).predicted_error, UNIT)
    point = choose_point(frontier, wish, unit=UNIT)
    assert point is not None
    assert point.computed <= 6
    assert predicted_psnr(point.predicted_error, UNIT) >= wish
    more = choose_point(frontier, wish, unit=UNIT, above=point.computed)
    assert more is not None
    assert more.computed > point.computed
    nearest = choose_point(frontier, 1e6, unit=UNIT)
    assert nearest is not None
    assert nearest.computed < STEPS  # computing every step is no policy
    assert choose_point(frontier, wish, unit=UNIT, above=STEPS - 1) is None


def test_solving_for_a_psnr(known: Profile, frontier: Frontier) -> None:
    unit = guess_unit(known)
    wish = predicted_psnr(frontier.select(compute_steps=6).predicted_error, unit)
    guessed = solve(known, min_psnr=wish - 1e-6)
    assert len(guessed.compute_steps) <= 6
    stricter = solve(known, min_psnr=wish, unit_psnr=unit - 12)
    assert len(stricter.compute_steps) > len(guessed.compute_steps)
    with pytest.raises(ValueError, match=r"expected to reach 900 dB; the best is \d"):
        solve(known, min_psnr=900.0)
    with pytest.raises(ValueError, match="predicts no error"):
        solve(known, min_psnr=40.0, method="paper")
    with pytest.raises(ValueError, match="exactly one of speedup, compute_steps, max_error, min_p"):
        solve(known, min_psnr=40.0, speedup=2.0)


def test_a_psnr_is_reached_and_measured(pipe: Any) -> None:
    call = CALL | {"num_inference_steps": 10, "batch_size": 4, "refit": False}
    policy = calibrate(pipe, PROMPTS[:4], heldout=HELDOUT[:2], min_psnr=40.0, **call)
    assert len(policy.compute_steps) < 10
    assert policy.validation[0].psnr >= 40
    assert falls_short(policy) is None
    assert policy.provenance["min psnr"] == "40"
    assert policy.profile is not None
    # With what was measured, solving alone comes to the same steps, if the first try was enough.
    again = solve(policy.profile, min_psnr=40.0, unit_psnr=float(policy.provenance["unit psnr"]))
    assert len(again.compute_steps) <= len(policy.compute_steps)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Measurements that are some decibels short of what is expected."""

    def script(short: float) -> list[int]:
        tried: list[int] = []

        def measure(pipe: Any, ways: list[Any], *_: Any, **__: Any) -> None:
            ways[1].decibels = [predicted_psnr(ways[1].policy.predicted_error, UNIT)]

        def validate(pipe: Any, policy: Policy, *_: Any, **__: Any) -> tuple[ValidationRow, ...]:
            tried.append(len(policy.compute_steps))
            assert policy.predicted_error is not None
            psnr = predicted_psnr(policy.predicted_error, UNIT) - short
            return (ValidationRow("policy", tried[-1], psnr=psnr, speedup=2.0, prompts=1),)

        monkeypatch.setattr(procedure, "measure", measure)
        monkeypatch.setattr(procedure, "validate", validate)
        return tried

    return script


def wished(psnr: float) -> Policy:
    arguments = CASES["flux"].arguments | {"max_sequence_length": 8, "num_inference_steps": 8}
    prompts = ["a red circle", "a blue square", "a red square"]
    pipe = CASES["flux"].build()
    return calibrate(pipe, prompts, heldout=prompts[:1], min_psnr=psnr, refit=False, **arguments)


def expected() -> list[float]:
    """The decibels that are expected of two to seven computed steps."""
    profile = wished(-100.0).profile
    assert profile is not None
    points = [point for point in solve_all(profile).points if point.computed < 8]
    return [predicted_psnr(point.predicted_error, UNIT) for point in points]


def test_a_try_that_falls_short_is_followed_by_another(scripted: Any) -> None:
    scripted(0.0)
    curve = expected()
    for short in (0.0, 0.5):
        tried = scripted(short)
        policy = wished(sorted(curve)[2])
        assert falls_short(policy) is None
        assert tried == sorted(set(tried))
        assert (len(tried) == 1) == (short == 0.0)
        assert policy.validation[0].computed_steps == tried[-1]


def test_a_psnr_out_of_reach_is_told(scripted: Any) -> None:
    tried = scripted(0.0)
    policy = wished(200.0)
    assert 1 <= len(tried) <= procedure.TRIES
    sentence = falls_short(policy)
    assert sentence is not None
    assert sentence.startswith("not reached: 200.0 dB were wished for, ")
    assert policy.validation[0].psnr == max(expected())
    nobody = replace(policy, provenance={})
    assert falls_short(nobody) is None
