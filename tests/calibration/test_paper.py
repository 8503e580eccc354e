"""The paper's method, calibrated on the network."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.paper import PASSES, PaperCalibration, calibrate_paper
from ertacache.calibration.session import Session
from ertacache.calibration.solve import PaperOptions, Target, make_policy, solve
from ertacache.core.flows import rmse
from ertacache.core.plans import PaperPlan
from ertacache.core.steppers import ThresholdSearch
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from tests.calibration.conftest import (
    RUNS,
    STEPS,
    TINY_HELDOUT,
    TINY_PROMPTS,
    TINY_RUNS,
    tiny_call,
)


@pytest.fixture(scope="module")
def calibration(session: Session, known: Profile) -> PaperCalibration:
    return PaperCalibration(session, known, RUNS[:2])


@pytest.fixture(scope="module")
def found(calibration: PaperCalibration) -> ThresholdSearch:
    return calibration.search_budget(STEPS // 2)


def final_error(session: Session, policy: Policy) -> float:
    """Distance of the final latents of calibration prompts to those of the full run."""
    return rmse(session.lockstep(RUNS[:2], policy), session.reference(RUNS[:2])[-1])


def test_the_search_comes_near_the_budget(found: ThresholdSearch) -> None:
    assert STEPS // 2 - 1 <= len(found.compute_steps) <= STEPS // 2
    assert found.compute_steps[0] == 0
    assert found.compute_steps[-1] == STEPS - 1
    reused = [k for k in range(STEPS) if k not in found.compute_steps]
    assert all(found.errors[k] < found.threshold for k in reused)
    assert all(found.errors[k] >= found.threshold for k in found.compute_steps[1:-1])
    assert all(found.step_scales[k] == 1 for k in found.compute_steps)
    assert all(0 <= found.step_scales[k] < 1 for k in reused)


def test_gain_and_bias_help_in_the_run_they_were_fitted_in(
    session: Session, known: Profile, calibration: PaperCalibration, found: ThresholdSearch
) -> None:
    fitted, bare = (
        make_policy(known, calibration.fit(found, adjust_timesteps=False, rectify=rectify))
        for rectify in (True, False)
    )
    assert isinstance(fitted.plan, PaperPlan)
    assert fitted.plan.gain is not None
    assert fitted.plan.gain.shape == (STEPS,)
    assert torch.equal(fitted.plan.sigmas, known.sigmas)
    assert final_error(session, fitted) < final_error(session, bare)


def test_gain_and_bias_per_element(tiny: Any, tiny_profile: Profile) -> None:
    session = Session(tiny, tiny_call(), batch_size=3)
    calibration = PaperCalibration(session, tiny_profile, TINY_RUNS[:3])
    plan = calibration.fit(calibration.search(0.9), mode="element")
    assert plan.gain is not None
    assert plan.gain.shape[1:] == tiny_profile.fingerprint.latent_shape


def test_calibrate_takes_the_network_and_solve_the_profile(
    tiny: Any, tiny_profile: Profile
) -> None:
    call = tiny_call() | {"heldout": TINY_HELDOUT[:1], "batch_size": 2}
    made = calibrate_paper(
        Session(tiny, tiny_call()),
        tiny_profile,
        TINY_RUNS[:2],
        target=Target(threshold=0.9, method="paper"),
        options=PaperOptions(),
    )
    whole = calibrate(tiny, TINY_PROMPTS[:2], method="paper", threshold=0.9, **call)
    assert made.compute_steps == whole.compute_steps
    assert len(made.compute_steps) < made.num_steps
    assert isinstance(made.plan, PaperPlan)
    assert isinstance(whole.plan, PaperPlan)
    assert made.plan.gain is not None
    assert whole.plan.gain is not None
    torch.testing.assert_close(made.plan.gain, whole.plan.gain, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(made.plan.sigmas, whole.plan.sigmas, rtol=0, atol=1e-3)
    assert whole.provenance["paper"] == "calibrated on the network"
    profiled = calibrate(tiny, TINY_PROMPTS[:2], method="paper", threshold=0.9, refit=False, **call)
    assert isinstance(profiled.plan, PaperPlan)
    assert profiled.profile is not None
    solved = solve(profiled.profile, method="paper", threshold=0.9).plan
    assert isinstance(solved, PaperPlan)
    assert profiled.plan.gain is not None
    assert solved.gain is not None
    assert torch.equal(profiled.plan.gain, solved.gain)
    assert not torch.equal(profiled.plan.gain, whole.plan.gain)
    assert "paper" not in profiled.provenance


def test_a_budget_out_of_range(tiny: Any, tiny_profile: Profile) -> None:
    session = Session(tiny, tiny_call())
    for budget in (1, 9):
        target = Target(compute_steps=budget, method="paper")
        with pytest.raises(ValueError, match=f"cannot compute {budget} of 8 steps"):
            calibrate_paper(session, tiny_profile, TINY_RUNS, target=target, options=PaperOptions())
    assert session.evaluations.total == 0


def scripted(monkeypatch: pytest.MonkeyPatch, counts: dict[float, int]) -> list[float]:
    """A search whose number of computed steps depends on the threshold only."""
    tried: list[float] = []

    def search(self: PaperCalibration, threshold: float) -> ThresholdSearch:
        tried.append(threshold)
        computed = next(n for limit, n in counts.items() if threshold <= limit)
        found = ThresholdSearch(threshold, norms=torch.ones(STEPS))
        found.compute_steps = (*range(computed - 1), STEPS - 1)
        found.errors += threshold / 2
        found.errors[1 : computed - 1] = 1.5 * threshold
        return found

    monkeypatch.setattr(PaperCalibration, "search", search)
    return tried


def test_the_search_ends(calibration: PaperCalibration, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = scripted(monkeypatch, {0.7: 11, 3.1: 8, math.inf: 4})
    assert len(calibration.search_budget(8).compute_steps) == 8
    assert len(tried) <= PASSES
    tried = scripted(monkeypatch, {0.7: 11, math.inf: 4})  # no threshold computes eight steps
    assert len(calibration.search_budget(8).compute_steps) == 4
    assert len(tried) == PASSES
    assert len(set(tried)) == PASSES
    far = 12 * tried[0]  # beyond what so many passes reach
    tried = scripted(monkeypatch, {far: 11, math.inf: 7})
    assert len(calibration.search_budget(8).compute_steps) == 7
    assert len(tried) > PASSES
    assert math.inf not in tried
    tried = scripted(monkeypatch, {1e9: 11, math.inf: 2})
    assert len(calibration.search_budget(8).compute_steps) == 2
    assert tried[-1] == math.inf
