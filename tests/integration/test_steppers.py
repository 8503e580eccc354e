"""The paper's calibration on pipelines is that of ``core``, and the run it fits is inference's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.plan import PaperPlan, Reuse
from ertacache.core.rectify import calibrate_rectification
from ertacache.core.residual import ReusedStep, residual
from ertacache.core.threshold import search_thresholds
from ertacache.core.timesteps import adjusted_sigmas, calibrate_step_scales
from ertacache.integration import attach
from ertacache.integration.walk import Walk, fit_gain_run, search_run
from tests.integration.setting import COMPUTED, STEPS, Setting, count_calls
from tests.integration.test_keystone import Stock, flux_denoiser
from tests.integration.tiny import CASES, call_arguments

THRESHOLDS = (0.4, 0.8, 1.2, 1.6, 3.0)


def make_walk(setting: Setting, reuse: Reuse = "residual", **changes: Any) -> Walk:
    run = setting.run
    features = run.outputs
    if reuse == "residual":
        features = tuple(residual(v, x) for v, x in zip(run.outputs, run.latents, strict=False))
    norms = torch.stack([f.abs().mean(dtype=torch.float64) for f in features])
    return Walk(
        setting.paper_policy(),
        reuse,
        norms,
        prompts=1,
        arguments=lambda: call_arguments(setting.case),
        **changes,
    )


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_it_is_algorithm_2_of_core(flux: Setting, reuse: Reuse) -> None:
    denoise = flux_denoiser(flux.pipe, **call_arguments(flux.case))
    expected = search_thresholds(
        denoise,
        flux.run,
        sigmas=flux.sigmas,
        thresholds=THRESHOLDS,
        reuse=reuse,
        solver=Stock,
    )
    walk = make_walk(flux, reuse)
    found = [search_run(flux.pipe, walk, threshold=lam) for lam in THRESHOLDS]
    assert {each.threshold: each.compute_steps for each in found} == expected
    assert len(set(expected.values())) > 2
    for each in found:
        scales = calibrate_step_scales(
            denoise,
            flux.run.latents[0],
            sigmas=flux.sigmas,
            compute_steps=each.compute_steps,
            reuse=reuse,
            solver=Stock,
        )
        torch.testing.assert_close(each.step_scales, scales, rtol=0, atol=1e-6)


@pytest.mark.parametrize("adjusted", [True, False])
@pytest.mark.parametrize("mode", ["scalar", "element"])
def test_gain_and_bias_are_those_of_core(flux: Setting, adjusted: bool, mode: Any) -> None:
    denoise = flux_denoiser(flux.pipe, **call_arguments(flux.case))
    scales = torch.tensor([1.0 if k in COMPUTED else 0.4 for k in range(STEPS)])
    table = adjusted_sigmas(flux.sigmas, scales) if adjusted else flux.sigmas
    expected = calibrate_rectification(
        denoise,
        flux.run.latents[0],
        sigmas=table,
        compute_steps=COMPUTED,
        solver=Stock,
        mode=mode,
    )
    plan = PaperPlan(COMPUTED, "residual", table)
    result = fit_gain_run(flux.pipe, make_walk(flux), plan=plan, mode=mode)
    for made, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)


class Remembering:
    """Uses the plan's own rectification, as inference does."""

    def computes(self, k: int, cached: Tensor, fresh: Tensor) -> bool:
        return k in COMPUTED

    def reuses(self, at: ReusedStep) -> Tensor:
        return at.reused


@pytest.mark.parametrize("scale", [1.0, 0.7, 0.2])
def test_the_run_is_that_of_inference(setting: Setting, scale: float) -> None:
    """Whatever the scheduler, its history and its table."""
    policy = setting.paper_policy(scale=scale, rectified=False)
    assert isinstance(policy.plan, PaperPlan)
    asked: list[int] = []
    walk = make_walk(setting, count=asked.append)
    with count_calls(setting.pipe.transformer) as calls:
        walked = walk.run(setting.pipe, policy.plan, Remembering())
    branches = 2 if setting.case is CASES["wan"] else 1
    assert (asked, len(calls)) == ([STEPS], branches * STEPS)
    with attach(setting.pipe, policy):
        assert torch.equal(setting.generate(), walked)


def test_an_expert_begins_with_a_computed_step(experts: Setting) -> None:
    found = search_run(experts.pipe, make_walk(experts), threshold=math.inf)
    assert found.compute_steps[0] == 0
    assert found.compute_steps[-1] == STEPS - 1
    assert len(found.compute_steps) == 3  # the second expert's first step between them
    everything = search_run(experts.pipe, make_walk(experts), threshold=0.0)
    assert everything.compute_steps == tuple(range(STEPS))


def test_nothing_reused_is_nothing_to_fit(flux: Setting) -> None:
    every = PaperPlan(tuple(range(STEPS)), "residual", flux.sigmas)
    gain, bias = fit_gain_run(flux.pipe, make_walk(flux), plan=every)
    assert gain.tolist() == [0.0] * STEPS
    assert bias.tolist() == [-2.0] * STEPS
    with pytest.raises(ValueError, match="mode must be"):
        fit_gain_run(flux.pipe, make_walk(flux), plan=every, mode="channel")
