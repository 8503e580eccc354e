"""Policies from a profile alone: targets, the paper's method, and what a PSNR predicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ertacache.calibration.session import Session
from ertacache.calibration.solve import (
    Target,
    choose_point,
    error_of,
    guess_unit,
    measured_unit,
    predicted_psnr,
    solve,
    solve_profile,
)
from ertacache.core.frontier import Frontier
from ertacache.core.plans import PaperPlan, steps_for_speedup
from ertacache.formats.profile import Profile
from tests.calibration.conftest import STEPS, counting_rows

UNIT = 20.0


@pytest.fixture(scope="module")
def frontier(known: Profile) -> Frontier:
    return solve_profile(known)


def test_a_speedup(known: Profile) -> None:
    policy = solve(known, speedup=2.0)
    assert policy.method == "trajectory"
    assert len(policy.compute_steps) == STEPS // 2
    assert policy.predicted_error is not None
    assert policy.predicted_error < 0.1
    assert policy.profile is known
    assert policy.fingerprint == known.fingerprint


def test_a_speedup_is_at_least_reached() -> None:
    for speedup in (1.0, 1.5, 2.0, 3.0, 7.0):
        computed = Target(speedup=speedup).budget(50)
        assert computed == steps_for_speedup(50, speedup)
        assert 50 / computed >= speedup > 50 / (computed + 1)
    assert Target(compute_steps=7).budget(50) == 7
    assert Target(max_error=0.1).budget(50) is None


def test_computed_steps_and_pinned_ones(known: Profile) -> None:
    policy = solve(known, compute_steps=5, pinned=[7], embed_profile=False)
    assert len(policy.compute_steps) == 5
    assert 7 in policy.compute_steps
    assert policy.profile is None


def test_an_error_to_stay_within(known: Profile, frontier: Frontier) -> None:
    limit = frontier.point(6).predicted_error
    policy = solve(known, max_error=limit)
    assert len(policy.compute_steps) <= 6
    assert policy.predicted_error is not None
    assert policy.predicted_error <= limit


def test_the_papers_method(known: Profile) -> None:
    policy = solve(known, method="paper", speedup=2.0)
    plan = policy.plan
    assert isinstance(plan, PaperPlan)
    assert 2 <= len(plan.compute_steps) <= STEPS // 2
    assert plan.reuse == "residual"
    assert not torch.equal(plan.sigmas, known.sigmas)
    assert plan.gain is not None
    bare = solve(known, method="paper", speedup=2.0, adjust_timesteps=False, rectify=False).plan
    assert isinstance(bare, PaperPlan)
    assert torch.equal(bare.sigmas, known.sigmas)
    assert bare.gain is None


def test_the_papers_threshold(known: Profile) -> None:
    few, many = (
        len(solve(known, method="paper", threshold=threshold, reuse="velocity").compute_steps)
        for threshold in (0.5, 0.02)
    )
    assert 2 <= few < many <= STEPS


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({}, "exactly one of"),
        ({"speedup": 2.0, "max_error": 0.1}, "exactly one of"),
        ({"speedup": 20.0}, "speedup must be between 1 and 6, got 20"),
        ({"threshold": 0.1}, "a threshold is the paper's"),
        ({"max_error": 0.1, "method": "paper"}, "predicts no error"),
        ({"speedup": 2.0, "method": "other"}, "method must be 'trajectory' or 'paper'"),
        ({"compute_steps": 99}, "budgets must lie between 1 and 12"),
        ({"compute_steps": 99, "method": "paper"}, "cannot compute 99 of 12 steps"),
    ],
)
def test_targets_that_cannot_be_met(known: Profile, target: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        solve(known, **target)


def test_solving_does_not_evaluate_the_network(session: Session, known: Profile) -> None:
    before = session.evaluations.total
    with counting_rows(session.pipe.transformer) as rows:
        solve(known, speedup=2.0)
        solve(known, method="paper", speedup=2.0)
    assert rows == []
    assert session.evaluations.total == before


def test_an_error_half_as_large_is_six_decibels() -> None:
    gain = predicted_psnr(0.01, UNIT) - predicted_psnr(0.02, UNIT)
    assert gain == pytest.approx(20 * math.log10(2))
    assert error_of(predicted_psnr(0.03, UNIT), UNIT) == pytest.approx(0.03)
    assert measured_unit(predicted_psnr(0.03, UNIT), 0.03) == pytest.approx(UNIT)
    assert math.isfinite(predicted_psnr(0.0, UNIT))


def test_the_fewest_steps_that_are_predicted_to_reach_a_psnr(frontier: Frontier) -> None:
    target = predicted_psnr(frontier.point(6).predicted_error, UNIT)
    point = choose_point(frontier, target, unit=UNIT)
    assert point is not None
    assert point.computed <= 6
    assert predicted_psnr(point.predicted_error, UNIT) >= target
    more = choose_point(frontier, target, unit=UNIT, above=point.computed)
    assert more is not None
    assert more.computed > point.computed
    nearest = choose_point(frontier, 1e6, unit=UNIT)
    assert nearest is not None
    assert nearest.computed < STEPS  # computing every step is no policy
    assert choose_point(frontier, target, unit=UNIT, above=STEPS - 1) is None


def test_solving_for_a_psnr(known: Profile, frontier: Frontier) -> None:
    target = predicted_psnr(frontier.point(6).predicted_error, guess_unit(known))
    guessed = solve(known, min_psnr=target - 1e-6)
    assert len(guessed.compute_steps) <= 6
    stricter = solve(known, min_psnr=target + 12)
    assert len(stricter.compute_steps) > len(guessed.compute_steps)
    with pytest.raises(ValueError, match=r"predicted to reach 900 dB; the best is \d"):
        solve(known, min_psnr=900.0)
    with pytest.raises(ValueError, match="predicts no error"):
        solve(known, min_psnr=40.0, method="paper")
    with pytest.raises(ValueError, match="exactly one of speedup, compute_steps, max_error, min_p"):
        solve(known, min_psnr=40.0, speedup=2.0)
