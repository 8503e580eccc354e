"""The steppers of calibration in a pipeline: those of ``core``, in the run that inference takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.distance import distances
from ertacache.core.paper import adjusted_sigmas, residual
from ertacache.core.paper_steppers import GainFit, ThresholdSearch
from ertacache.core.plans import PaperPlan, Reuse
from ertacache.core.sampler import Stepper, run
from ertacache.core.simulate import Fit
from ertacache.core.steppers import RefitStepper
from ertacache.formats.policy import PolicyError
from ertacache.integration.attach import Handle, attach
from ertacache.integration.microbatch import MicroBatch
from ertacache.integration.record import record
from tests.integration.reference import OriginalSteps, flux_denoiser
from tests.integration.setting import COMPUTED, STEPS, Setting, count_calls
from tests.integration.tiny import call_arguments

THRESHOLDS = (0.4, 0.8, 1.2, 1.6, 3.0)


def drive(setting: Setting, stepper: Stepper, *, steps: int) -> Tensor:
    """One run of the pipeline with a stepper in the place of the policy's own."""
    with (
        Handle(setting.pipe, setting.paper_policy(), stepper=stepper) as handle,
        count_calls(setting.pipe.transformer) as seen,
    ):
        result = setting.generate()
    assert handle.stats.last.computed_steps == steps
    assert len(seen) == setting.branches * steps
    return result


def core(setting: Setting, stepper: Stepper) -> tuple[Tensor, ...]:
    """The same without a pipeline, over the network of Flux and its scheduler's own steps."""
    denoise = flux_denoiser(setting.pipe, **call_arguments(setting.case))
    noise = setting.run.latents[0]
    return run(denoise, noise, stepper, sigmas=setting.sigmas, solver=OriginalSteps)


def search(setting: Setting, threshold: float, reuse: Reuse = "residual") -> ThresholdSearch:
    full = setting.run
    features = full.outputs
    if reuse == "residual":
        features = tuple(residual(v, x) for v, x in zip(full.outputs, full.latents, strict=False))
    norms = torch.stack([f.abs().mean(dtype=torch.float64) for f in features])
    return ThresholdSearch(threshold, norms=norms, reuse=reuse)


def adjusted_plan(setting: Setting, scale: float) -> PaperPlan:
    phi = torch.tensor([1.0 if k in COMPUTED else scale for k in range(STEPS)])
    sigmas = setting.sigmas if scale == 1 else adjusted_sigmas(setting.sigmas, phi)
    return PaperPlan(COMPUTED, "residual", sigmas)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_threshold_search_is_that_of_core(flux: Setting, reuse: Reuse) -> None:
    """Algorithm 2: the same schedule, eq. 12 and phi for every threshold, bit for bit."""
    schedules = set()
    for threshold in THRESHOLDS:
        found, expected = (search(flux, threshold, reuse) for _ in range(2))
        latents = core(flux, expected)
        assert torch.equal(drive(flux, found, steps=STEPS), latents[-1])
        assert found.compute_steps == expected.compute_steps
        assert torch.equal(found.errors, expected.errors)
        assert torch.equal(found.step_scales, expected.step_scales)
        schedules.add(found.compute_steps)
    assert len(schedules) > 2


@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("mode", ["scalar", "element"])
def test_gain_and_bias_are_those_of_core(flux: Setting, scale: float, mode: Any) -> None:
    plan = adjusted_plan(flux, scale)
    fitted, expected = (GainFit(plan, mode=mode) for _ in range(2))
    latents = core(flux, expected)
    assert torch.equal(drive(flux, fitted, steps=STEPS), latents[-1])
    pairs = zip(gain_and_bias(fitted.plan()), gain_and_bias(expected.plan()), strict=True)
    shape = flux.run.latents[0].shape[1:] if mode == "element" else ()
    for made, wanted in pairs:
        assert torch.equal(made, wanted)
        assert made.shape == (STEPS, *shape)


def gain_and_bias(plan: PaperPlan) -> tuple[Tensor, Tensor]:
    assert plan.gain is not None
    assert plan.bias is not None
    return plan.gain, plan.bias


def refitting(setting: Setting, latents: Any = None, **changes: Any) -> RefitStepper:
    return RefitStepper(
        setting.run.latents if latents is None else latents,
        compute_steps=COMPUTED,
        nominal=setting.nominal,
        fit=Fit(history=2, ridge=1e-3),
        **changes,
    )


def test_refit_is_that_of_core(flux: Setting) -> None:
    fitted, expected = refitting(flux), refitting(flux)
    latents = core(flux, expected)
    assert torch.equal(drive(flux, fitted, steps=len(COMPUTED)), latents[-1])
    assert torch.equal(fitted.coefficients, expected.coefficients)
    assert torch.equal(fitted.distances, expected.distances)
    assert bool(torch.isfinite(fitted.distances).all())


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_the_run_of_a_search_is_that_of_inference(setting: Setting, reuse: Reuse) -> None:
    """Whatever the scheduler and its history: reuse as decided, on the nominal sigmas."""
    everything_reused = search(setting, math.inf, reuse)
    drive(setting, everything_reused, steps=STEPS)
    median = everything_reused.errors[1:-1].median().item()
    found = search(setting, median, reuse)
    searched = drive(setting, found, steps=STEPS)
    assert 2 < len(found.compute_steps) < STEPS
    policy = setting.policy(PaperPlan(found.compute_steps, reuse, setting.sigmas))
    with attach(setting.pipe, policy) as handle:
        assert torch.equal(setting.generate(), searched)
    assert handle.stats.last.computed_steps == len(found.compute_steps)


@pytest.mark.parametrize("scale", [1.0, 0.7, 0.2])
def test_the_run_of_a_gain_fit_is_that_of_inference(setting: Setting, scale: float) -> None:
    """Whatever the scheduler, its history and its sigmas."""
    fit = GainFit(adjusted_plan(setting, scale))
    fitted = drive(setting, fit, steps=STEPS)
    with attach(setting.pipe, setting.policy(fit.plan())):
        assert torch.equal(setting.generate(), fitted)


def test_the_run_of_a_refit_is_that_of_inference(setting: Setting) -> None:
    refit = refitting(setting)
    fitted = drive(setting, refit, steps=len(COMPUTED))
    with attach(setting.pipe, setting.policy(refit.plan())):
        assert torch.equal(setting.generate(), fitted)
    assert not torch.equal(fitted, setting.run.latents[-1])


def test_prompts_in_lockstep(flux: Setting) -> None:
    """A batch in micro-batches: the coefficients fit the first prompt, the other runs along."""
    batch = {
        "prompt": ["a red circle", "a blue square"],
        "generator": [torch.Generator().manual_seed(k) for k in (3, 4)],
    }
    latents = record(flux.pipe, **call_arguments(flux.case, **batch)).run.latents
    refit = refitting(flux, latents, weights=torch.tensor([[1.0, 0.0]]))
    policy, micro = flux.paper_policy(), MicroBatch(1, prompts=2)
    batch["generator"] = [torch.Generator().manual_seed(k) for k in (3, 4)]
    with (
        Handle(flux.pipe, policy, stepper=refit, micro_batch=micro),
        count_calls(flux.pipe.transformer) as calls,
    ):
        reached = flux.generate(**batch)
    assert len(calls) == 2 * len(COMPUTED)
    torch.testing.assert_close(refit.distances, distances(reached, latents[-1]))
    alone = refitting(flux, [x[:1] for x in latents])
    first = {"prompt": "a red circle", "generator": torch.Generator().manual_seed(3)}
    with Handle(flux.pipe, policy, stepper=alone):
        flux.generate(**first)
    torch.testing.assert_close(refit.coefficients, alone.coefficients, rtol=1e-3, atol=1e-4)


def test_an_expert_begins_with_a_computed_step(experts: Setting) -> None:
    found = search(experts, math.inf)
    first = record(experts.pipe, **call_arguments(experts.case)).expert_steps[0]
    with Handle(experts.pipe, experts.paper_policy(), stepper=found):
        experts.generate()
    assert found.compute_steps == (0, first, STEPS - 1)
    everything = search(experts, 0.0)
    with Handle(experts.pipe, experts.paper_policy(), stepper=everything):
        experts.generate()
    assert everything.compute_steps == tuple(range(STEPS))


def test_nothing_reused_is_nothing_to_fit(flux: Setting) -> None:
    every = PaperPlan(tuple(range(STEPS)), "residual", flux.sigmas)
    fit = GainFit(every)
    assert torch.equal(drive(flux, fit, steps=STEPS), flux.run.latents[-1])
    gain, bias = gain_and_bias(fit.plan())
    assert gain.tolist() == [0.0] * STEPS
    assert bias.tolist() == [-2.0] * STEPS


def test_calibration_run_of_other_steps_is_refused(flux: Setting) -> None:
    stepper, last = search(flux, 1.0), torch.linspace(1, 1 / STEPS, STEPS).tolist()[2:]
    with (
        Handle(flux.pipe, flux.paper_policy(), stepper=stepper),
        pytest.raises(PolicyError, match="the run has 6 steps, but this calibration is for 8: lea"),
    ):
        flux.generate(sigmas=last)
    assert stepper.compute_steps == ()
