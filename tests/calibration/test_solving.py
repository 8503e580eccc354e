from __future__ import annotations

from typing import Any

import pytest
import torch

from ertacache.calibration import solve
from ertacache.calibration.solving import solve_all
from ertacache.core.plan import PaperPlan
from ertacache.formats.profile import Profile
from tests.calibration.conftest import STEPS


def test_a_speedup(known: Profile) -> None:
    policy = solve(known, speedup=2.0)
    assert policy.method == "trajectory"
    assert len(policy.compute_steps) == STEPS // 2
    assert policy.predicted_error is not None
    assert policy.predicted_error < 0.1
    assert policy.profile is known
    assert policy.fingerprint == known.fingerprint


def test_computed_steps_and_pinned_ones(known: Profile) -> None:
    policy = solve(known, compute_steps=5, pinned=[7], embed_profile=False)
    assert len(policy.compute_steps) == 5
    assert 7 in policy.compute_steps
    assert policy.profile is None


def test_an_error_to_stay_within(known: Profile) -> None:
    frontier = solve_all(known)
    limit = frontier.select(compute_steps=6).predicted_error
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
    ("wish", "sentence"),
    [
        ({}, "exactly one of"),
        ({"speedup": 2.0, "max_error": 0.1}, "exactly one of"),
        ({"speedup": 20.0}, "speedup must be between 1 and 8, got 20"),
        ({"threshold": 0.1}, "a threshold is the paper's"),
        ({"max_error": 0.1, "method": "paper"}, "predicts no error"),
        ({"compute_steps": 99}, "budgets must lie between 1 and 16"),
    ],
)
def test_wishes_that_cannot_be_met(known: Profile, wish: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        solve(known, **wish)
