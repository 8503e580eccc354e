"""The closed-loop refit, on calibration prompts whose latents the session keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration.refit import refit, refit_policy
from ertacache.calibration.session import Session, number_runs
from ertacache.calibration.solve import make_policy, solve
from ertacache.core.flows import rmse
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import RefitStepper, typical_distance
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfileError
from tests.calibration.conftest import (
    HELDOUT,
    RUNS,
    STEPS,
    TINY_HELDOUT,
    TINY_STEPS,
    tiny_call,
)

UNSEEN = number_runs(HELDOUT, seed=50)


def heldout_error(session: Session, policy: Policy) -> float:
    return rmse(session.lockstep(UNSEEN, policy), session.reference(UNSEEN)[-1])


def test_the_refit_is_kept_only_if_it_helps(session: Session, known: Profile) -> None:
    solved = solve(known, speedup=4.0)
    refitted = refit_policy(session, solved, known, RUNS)
    assert len(refitted.compute_steps) == STEPS // 4
    assert heldout_error(session, refitted) <= 1.02 * heldout_error(session, solved)


def test_a_poor_schedule_is_replaced(session: Session, known: Profile) -> None:
    uniform = (0, 4, 7, 11)
    (plan,) = fit_plans(known.statistics, known.nominal, schedules=[(0, 1, 2, 3)], fit=Fit())
    poor = make_policy(known, plan)
    refitted = refit_policy(session, poor, known, RUNS)
    assert refitted.compute_steps == uniform
    assert heldout_error(session, refitted) < 0.5 * heldout_error(session, poor)


def test_one_prompt_is_not_refitted(session: Session, known: Profile) -> None:
    solved, before = solve(known, speedup=4.0), session.evaluations.refit
    assert refit_policy(session, solved, known, RUNS[:1]) is solved  # none to evaluate it on
    assert session.evaluations.refit == before


def test_prompts_that_are_not_fitted_on_run_along(session: Session, known: Profile) -> None:
    policy, latents = solve(known, speedup=4.0), session.reference(RUNS)
    plans, errors = [], []
    for fitted in (None, 2):
        stepper = RefitStepper(
            latents,
            compute_steps=policy.compute_steps,
            nominal=known.nominal,
            fit=Fit(),
            fitted=fitted,
        )
        session.lockstep(RUNS, policy, stepper)
        plans.append(stepper.plan())
        errors.append(stepper.error)
    whole, half = plans
    assert not torch.equal(whole.coefficients, half.coefficients)
    final = session.lockstep(RUNS[2:], replace(policy, plan=half))
    assert typical_distance(final, latents[-1][2:]) == pytest.approx(errors[1], rel=1e-3)


def test_a_saved_policy_is_refitted_for_another_budget(
    tiny: Any, tiny_profile: Profile, tmp_path: Path
) -> None:
    solve(tiny_profile, compute_steps=4).save(tmp_path / "policy.safetensors")
    tiny_profile.save(tmp_path / "profile.safetensors")
    call, stages = tiny_call() | {"batch_size": 5}, list[str]()
    again = refit(
        tiny,
        tmp_path / "policy.safetensors",
        compute_steps=3,
        heldout=TINY_HELDOUT,
        stage=lambda name: stages.append(name),
        **call,
    )
    assert len(again.compute_steps) == 3
    assert stages == ["refit", "validate"]
    assert [row.method for row in again.validation] == ["policy", "plain reuse", "fewer steps"]
    assert again.validation[0].prompts == len(TINY_HELDOUT)
    assert again.profile is not None
    assert again.profile.prompts == tiny_profile.prompts
    halved = refit(tiny, str(tmp_path / "profile.safetensors"), speedup=8 / 3, **call)
    assert isinstance(halved.plan, TrajectoryPlan)
    assert isinstance(again.plan, TrajectoryPlan)
    assert torch.equal(halved.plan.coefficients, again.plan.coefficients)
    assert halved.validation == ()


def test_the_budget_of_a_policy_is_its_own(tiny: Any, tiny_profile: Profile) -> None:
    solved = solve(tiny_profile, compute_steps=5)
    call = {name: value for name, value in tiny_call().items() if name != "num_inference_steps"}
    refitted = refit(tiny, solved, refit_prompts=2, **call)  # the steps are the profile's
    assert len(refitted.compute_steps) == 5
    assert refitted.num_steps == TINY_STEPS


def test_what_cannot_be_refitted(tiny: Any, tiny_profile: Profile) -> None:
    bare = solve(tiny_profile, compute_steps=5, embed_profile=False)
    with pytest.raises(ValueError, match="carries no profile to refit: calibrate again"):
        refit(tiny, bare, **tiny_call())
    with pytest.raises(ValueError, match="exactly one of"):
        refit(tiny, tiny_profile, **tiny_call())
    with pytest.raises(ValueError, match="exactly one of"):
        refit(tiny, tiny_profile, compute_steps=3, speedup=2.0, **tiny_call())
    other = tiny_call() | {"num_inference_steps": 6}
    with pytest.raises(ProfileError, match="num_steps is 6, was 8"):
        refit(tiny, tiny_profile, compute_steps=3, **other)
