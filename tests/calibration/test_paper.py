"""The paper's method, calibrated on the network."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.paper import PASSES, PaperCalibration, calibrate_paper
from ertacache.calibration.session import Session, number_runs
from ertacache.calibration.solve import PaperOptions, solve
from ertacache.core.flows import rmse
from ertacache.core.paper_steppers import ThresholdSearch
from ertacache.core.plans import PaperPlan
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.integration.solve import profile_of
from tests.calibration.conftest import (
    RUNS,
    STEPS,
    TINY_HELDOUT,
    TINY_PROMPTS,
    TINY_RUNS,
    counting_rows,
    tiny_call,
)


@pytest.fixture(scope="module")
def calibration(session: Session, known: Policy) -> PaperCalibration:
    return PaperCalibration(session, known, RUNS[:2])


@pytest.fixture(scope="module")
def found(calibration: PaperCalibration) -> ThresholdSearch:
    return calibration.search_budget(STEPS // 2)


def final_error(session: Session, known: Policy, plan: PaperPlan) -> float:
    """Distance of the final latents of calibration prompts to those of the full run."""
    fitted = FittedPlan(plan, profile_of(known).schedule.sigmas)
    final = session.lockstep(RUNS[:2], Policy(known.fingerprint, plans=(fitted,)))
    return rmse(final, session.reference(RUNS[:2]).latents[-1])


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
    session: Session, known: Policy, calibration: PaperCalibration, found: ThresholdSearch
) -> None:
    fitted, bare = (
        calibration.fit(found, adjust_timesteps=False, rectify=rectify) for rectify in (True, False)
    )
    assert fitted.gain is not None
    assert fitted.gain.shape == (STEPS,)
    assert torch.equal(fitted.sigmas, profile_of(known).schedule.sigmas)
    assert final_error(session, known, fitted) < final_error(session, known, bare)


def test_gain_and_bias_per_element(tiny: Any, tiny_known: Policy) -> None:
    session = Session(tiny, tiny_call(), batch_size=3)
    calibration = PaperCalibration(session, tiny_known, TINY_RUNS[:3])
    plan = calibration.fit(calibration.search(0.9), mode="element")
    assert plan.gain is not None
    assert plan.gain.shape[1:] == tiny_known.fingerprint.latent_shape


def paper_plan(policy: Policy) -> PaperPlan:
    (fitted,) = policy.plans
    assert isinstance(fitted.plan, PaperPlan)
    return fitted.plan


def test_calibrate_takes_the_network_and_solve_the_profile(tiny: Any, tiny_known: Policy) -> None:
    call = tiny_call() | {"heldout": TINY_HELDOUT[:1], "batch_size": 2}
    session = Session(tiny, tiny_call())
    options = PaperOptions()
    fitted = calibrate_paper(session, tiny_known, TINY_RUNS[:2], threshold=0.9, options=options)
    made = fitted.plan
    whole = paper_plan(calibrate(tiny, TINY_PROMPTS[:2], method="paper", threshold=0.9, **call))
    assert made.compute_steps == whole.compute_steps
    assert len(made.compute_steps) < made.num_steps
    assert isinstance(made, PaperPlan)
    assert made.gain is not None
    assert whole.gain is not None
    torch.testing.assert_close(made.gain, whole.gain, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(made.sigmas, whole.sigmas, rtol=0, atol=1e-3)
    assert torch.equal(fitted.sigmas, profile_of(tiny_known).schedule.sigmas)
    assert fitted.target is None  # the scheduler's own steps: any will do
    profiled = calibrate(tiny, TINY_PROMPTS[:2], method="paper", threshold=0.9, refit=False, **call)
    bare = Policy(profiled.fingerprint, profile=profiled.profile)
    gains = [paper_plan(p).gain for p in (profiled, solve(bare, method="paper", threshold=0.9))]
    assert gains[0] is not None
    assert gains[1] is not None
    assert torch.equal(gains[0], gains[1])
    assert not torch.equal(gains[0], whole.gain)


def test_the_default_speedups(tiny: Any) -> None:
    call = tiny_call() | {"heldout": TINY_HELDOUT[:1], "batch_size": 2}
    policy = calibrate(tiny, TINY_PROMPTS[:2], method="paper", rectify=False, **call)
    assert [plan.method for plan in policy.plans] == ["paper", "paper"]
    computed = [len(plan.compute_steps) for plan in policy.plans]
    assert all(2 <= n <= limit for n, limit in zip(computed, (4, 2), strict=True))
    assert [plan.validation[0].computed_steps for plan in policy.plans] == computed
    assert policy.fits == policy.frontier == ()  # nothing of ours is measured or searched


def test_a_budget_out_of_range(tiny: Any, tiny_known: Policy) -> None:
    session = Session(tiny, tiny_call())
    for budget in (1, 9):
        with pytest.raises(ValueError, match=f"cannot compute {budget} of 8 steps"):
            calibrate_paper(session, tiny_known, TINY_RUNS, budget=budget, options=PaperOptions())
    assert session.evaluations.total == 0


def test_all_runs_share_one_call(tiny: Any, tiny_known: Policy) -> None:
    """Its decisions are for one batch, so an argument cannot differ between its runs."""
    varied = number_runs(TINY_PROMPTS[:2], varied={"guidance_scale": [2.0, 5.0]})
    with pytest.raises(ValueError, match="one value of every argument"):
        PaperCalibration(Session(tiny, tiny_call()), tiny_known, varied)
    call = tiny_call() | {"guidance_scale": [2.0, 5.0], "method": "paper", "threshold": 0.9}
    with (
        counting_rows(tiny.transformer) as rows,
        pytest.raises(ValueError, match="one value of every argument"),
    ):
        calibrate(tiny, TINY_PROMPTS[:2], heldout=TINY_HELDOUT, **call)
    assert rows == []  # before any run


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
