"""Plans from a profile alone: targets, the paper's method, and what a PSNR predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ertacache.calibration.session import Session
from ertacache.calibration.solve import solve
from ertacache.core.plans import PaperPlan
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.solve import (
    PlanSolver,
    predicted_psnr,
    profile_frontier,
    profile_of,
    with_frontier,
)
from tests.calibration.conftest import STEPS, counting_rows

UNIT = 20.0


@pytest.fixture(scope="module")
def known(known: Policy) -> Policy:
    """With its frontier and a unit."""
    return replace(with_frontier(known), unit_psnr=UNIT)


def one_plan(policy: Policy) -> FittedPlan:
    (plan,) = policy.plans
    return plan


def paper_plan(policy: Policy) -> PaperPlan:
    plan = one_plan(policy).plan
    assert isinstance(plan, PaperPlan)
    return plan


def test_a_speedup(known: Policy) -> None:
    policy = solve(known, speedup=2.0)
    plan, schedule = one_plan(policy), profile_of(known).schedule
    assert plan.method == "trajectory"
    assert len(plan.compute_steps) == STEPS // 2
    assert plan.predicted_error is not None
    assert plan.predicted_error < 0.1
    assert plan.fits(schedule)
    assert policy.profile is known.profile
    assert policy.fingerprint == known.fingerprint
    assert policy.frontier == known.frontier


def test_computed_steps(known: Policy) -> None:
    """The schedule of the frontier, with the error that stands there."""
    for computed in (2, 5, STEPS):
        plan, point = one_plan(solve(known, compute_steps=computed)), known.frontier[computed - 2]
        assert plan.compute_steps == point.compute_steps
        assert plan.predicted_error == point.predicted_error


def test_one_budget_solved_is_as_good_as_its_point_on_the_frontier(known: Policy) -> None:
    """Also from a profile that has no frontier yet, as ``solve`` gets it from ``profile``."""
    bare = replace(known, frontier=())
    for computed in (4, 6):
        plan, point = one_plan(solve(bare, compute_steps=computed)), known.frontier[computed - 2]
        assert plan.compute_steps == point.compute_steps
        assert plan.predicted_error == pytest.approx(point.predicted_error, rel=1e-9)
        (part,) = profile_frontier(bare, budgets=[computed]).points  # without its neighbours
        assert plan.predicted_error <= part.predicted_error * (1 + 1e-9)


def test_plans_add_up_and_one_for_the_same_budget_is_replaced(known: Policy) -> None:
    both = solve(solve(known, speedup=2.0), speedup=3.0)
    assert [len(plan.compute_steps) for plan in both.plans] == [6, 4]
    again = solve(both, compute_steps=6)
    assert [len(plan.compute_steps) for plan in again.plans] == [6, 4]
    assert again.plans[0] is not both.plans[0]
    assert again.plans[1] is both.plans[1]
    paper = solve(again, method="paper", compute_steps=6)
    assert [plan.method for plan in paper.plans] == ["paper", "trajectory", "trajectory"]


def test_the_papers_method(known: Policy) -> None:
    sigmas = profile_of(known).schedule.sigmas
    plan = paper_plan(solve(known, method="paper", speedup=2.0))
    assert 2 <= len(plan.compute_steps) <= STEPS // 2
    assert plan.reuse == "residual"
    assert not torch.equal(plan.sigmas, sigmas)
    assert plan.gain is not None
    off = {"adjust_timesteps": False, "rectify": False}
    bare = paper_plan(solve(known, method="paper", speedup=2.0, **off))
    assert torch.equal(bare.sigmas, sigmas)
    assert bare.gain is None


def test_the_papers_threshold(known: Policy) -> None:
    few, many = (
        paper_plan(solve(known, method="paper", threshold=threshold, reuse="velocity"))
        for threshold in (0.5, 0.02)
    )
    assert 2 <= len(few.compute_steps) < len(many.compute_steps) <= STEPS


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({}, "exactly one of speedup, compute_steps, min_psnr and threshold"),
        ({"speedup": 2.0, "threshold": 0.1}, "exactly one of"),
        ({"speedup": 2.0, "min_psnr": 40.0}, "give one target, not speedup and min_psnr"),
        ({"speedup": 20.0}, "speedup must be between 1 and 6, got 20"),
        ({"speedup": 0.5}, "speedup must be a finite number of at least 1, got 0.5"),
        ({"threshold": 0.1}, "a threshold is the paper's"),
        ({"threshold": -1.0, "method": "paper"}, "threshold must be a finite number of at least 0"),
        ({"min_psnr": 40.0, "method": "paper"}, "predicts no error"),
        ({"compute_steps": 99}, "cannot compute 99 of 12 steps"),
        ({"compute_steps": 99, "method": "paper"}, "cannot compute 99 of 12 steps"),
        ({"speedup": 2.0, "method": "other"}, "method must be 'trajectory' or 'paper'"),
    ],
)
def test_targets_that_cannot_be_met(known: Policy, target: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        solve(known, **target)


def test_a_policy_without_a_profile(known: Policy) -> None:
    bare = Policy(known.fingerprint, plans=solve(known, speedup=2.0).plans)
    with pytest.raises(PolicyError, match="has no profile, so that nothing can be solved"):
        solve(bare, speedup=3.0)


def test_solving_does_not_evaluate_the_network(session: Session, known: Policy) -> None:
    before = session.evaluations.total
    with counting_rows(session.pipe.transformer) as rows:
        solve(known, speedup=2.0)
        solve(known, method="paper", speedup=2.0)
    assert rows == []
    assert session.evaluations.total == before


def test_the_fewest_steps_that_are_predicted_to_reach_a_psnr(known: Policy) -> None:
    errors = [point.predicted_error for point in known.frontier]  # of 2, 3, ... computed steps
    psnr = predicted_psnr(errors[4], UNIT)
    assert len(one_plan(solve(known, min_psnr=psnr - 1e-6)).compute_steps) <= 6
    stricter = one_plan(solve(known, min_psnr=psnr + 1e-6))
    assert len(stricter.compute_steps) > 6
    assert stricter.predicted_error is not None
    assert predicted_psnr(stricter.predicted_error, UNIT) >= psnr
    fewer = errors[len(stricter.compute_steps) - 3]
    assert predicted_psnr(fewer, UNIT) < psnr + 1e-6
    with pytest.raises(ValueError, match=r"predicted to reach 900 dB; the best is \d"):
        solve(known, min_psnr=900.0)


def test_a_unit_that_was_not_measured_is_guessed(known: Policy) -> None:
    guessed = PlanSolver(replace(known, unit_psnr=None))
    error = known.frontier[4].predicted_error
    policy = solve(replace(known, unit_psnr=None), min_psnr=guessed.psnr(error) - 1e-6)
    assert len(one_plan(policy).compute_steps) <= 6
