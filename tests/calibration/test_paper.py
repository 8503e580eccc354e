"""The paper's method, calibrated on the network."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ertacache.calibration import calibrate, solve
from ertacache.calibration.paper import (
    PASSES,
    calibrate_paper,
    fit_paper_plan,
    make_walk,
    search_schedule,
)
from ertacache.calibration.profiling import generators, number_runs
from ertacache.calibration.solving import Wish
from ertacache.core.flows import rmse
from ertacache.core.plan import PaperPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.integration import attach, record_run
from ertacache.integration.walk import Search, Walk
from tests.calibration.conftest import CALL, HELDOUT, PROMPTS, STEPS


@pytest.fixture(scope="module")
def walk(known: Profile) -> Walk:
    return make_walk(known, number_runs(PROMPTS[:2]), call=CALL)


@pytest.fixture(scope="module")
def found(pipe: Any, known: Profile, walk: Walk) -> Search:
    return search_schedule(pipe, walk, known, budget=STEPS // 2)


def final_error(pipe: Any, policy: Policy) -> float:
    """Distance of the final latent of calibration prompts to that of the untouched run."""
    runs = number_runs(PROMPTS[:2])
    call = CALL | {"prompt": PROMPTS[:2]}
    full, _ = record_run(pipe, generator=generators(runs), **call)
    with attach(pipe, policy):
        return rmse(
            pipe(generator=generators(runs), output_type="latent", **call)[0], full.latents[-1]
        )


def test_the_search_comes_near_the_wished_number(found: Search) -> None:
    assert STEPS // 2 - 1 <= len(found.compute_steps) <= STEPS // 2
    assert found.compute_steps[0] == 0
    assert found.compute_steps[-1] == STEPS - 1
    reused = [k for k in range(STEPS) if k not in found.compute_steps]
    assert all(found.errors[k] < found.threshold for k in reused)
    assert all(found.errors[k] >= found.threshold for k in found.compute_steps[1:-1])
    assert all(found.step_scales[k] == 1 for k in found.compute_steps)
    assert all(0 <= found.step_scales[k] < 1 for k in reused)


def test_gain_and_bias_help_in_the_run_they_were_fitted_in(
    pipe: Any, known: Profile, walk: Walk, found: Search
) -> None:
    plans = [
        fit_paper_plan(pipe, walk, found, adjust_timesteps=False, rectify=rectify)
        for rectify in (True, False)
    ]
    fitted, bare = (Policy(plan, known.sigmas, fingerprint=known.fingerprint) for plan in plans)
    assert isinstance(fitted.plan, PaperPlan)
    assert fitted.plan.gain is not None
    assert torch.equal(fitted.plan.sigmas, known.sigmas)
    assert final_error(pipe, fitted) < final_error(pipe, bare)


def test_calibrate_takes_the_network_and_solve_the_profile(pipe: Any, known: Profile) -> None:
    call = CALL | {"heldout": HELDOUT[:1], "batch_size": 2}
    runs = number_runs(PROMPTS[:2])
    made = calibrate_paper(
        pipe, known, runs, wish=Wish(threshold=0.15, method="paper"), call=CALL, batch_size=1
    )
    whole = calibrate(pipe, PROMPTS[:2], method="paper", threshold=0.15, **call)
    assert made.compute_steps == whole.compute_steps
    assert isinstance(made.plan, PaperPlan)
    assert isinstance(whole.plan, PaperPlan)
    assert made.plan.gain is not None
    assert whole.plan.gain is not None
    torch.testing.assert_close(made.plan.gain, whole.plan.gain, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(made.plan.sigmas, whole.plan.sigmas, rtol=0, atol=1e-3)
    assert whole.provenance["paper"] == "calibrated on the network"
    profiled = calibrate(pipe, PROMPTS[:2], method="paper", threshold=0.15, refit=False, **call)
    assert isinstance(profiled.plan, PaperPlan)
    assert profiled.profile is not None
    solved = solve(profiled.profile, method="paper", threshold=0.15).plan
    assert isinstance(solved, PaperPlan)
    assert profiled.plan.gain is not None
    assert solved.gain is not None
    assert torch.equal(profiled.plan.gain, solved.gain)
    assert not torch.equal(profiled.plan.gain, whole.plan.gain)
    assert "paper" not in profiled.provenance


def scripted(monkeypatch: pytest.MonkeyPatch, counts: dict[float, int]) -> list[float]:
    """A search whose number of computed steps falls from table to table of thresholds."""
    tried: list[float] = []

    def run(pipe: Any, walk: Walk, *, threshold: float) -> Search:
        tried.append(threshold)
        computed = next(n for limit, n in counts.items() if threshold <= limit)
        steps = (*range(computed - 1), STEPS - 1)
        errors = torch.full((STEPS,), threshold / 2, dtype=torch.float64)
        errors[1 : computed - 1] = 1.5 * threshold
        return Search(threshold, steps, errors, torch.ones(STEPS, dtype=torch.float64))

    monkeypatch.setattr("ertacache.calibration.paper.search_run", run)
    return tried


def test_the_search_ends(known: Profile, walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = scripted(monkeypatch, {0.7: 12, 3.1: 8, math.inf: 4})
    assert len(search_schedule(None, walk, known, budget=8).compute_steps) == 8  # type: ignore[arg-type]
    assert len(tried) <= PASSES
    tried = scripted(monkeypatch, {0.7: 12, math.inf: 4})  # no threshold computes eight steps
    assert len(search_schedule(None, walk, known, budget=8).compute_steps) == 4  # type: ignore[arg-type]
    assert len(tried) == PASSES
    assert len(set(tried)) == PASSES
    far = 12 * tried[0]  # so many passes do not come there
    tried = scripted(monkeypatch, {far: 12, math.inf: 7})
    assert len(search_schedule(None, walk, known, budget=8).compute_steps) == 7  # type: ignore[arg-type]
    assert len(tried) > PASSES
    assert math.inf not in tried
    tried = scripted(monkeypatch, {1e9: 12, math.inf: 2})
    assert len(search_schedule(None, walk, known, budget=8).compute_steps) == 2  # type: ignore[arg-type]
    assert tried[-1] == math.inf
