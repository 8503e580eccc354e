"""One stepper, two drivers: a pipeline and the loop of ``core.sampler`` reach the same latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.gram import profile_run
from ertacache.core.paper_steppers import PaperStepper
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.sampler import run
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import TrajectoryStepper, combine, make_stepper
from ertacache.formats.policy import Policy
from ertacache.integration.attach import Handle, attach
from ertacache.integration.identity import fingerprint
from ertacache.integration.record import record
from ertacache.models import MODELS, load_pipeline, load_prompts
from tests.integration.reference import OriginalSteps, flux_denoiser, replayed
from tests.integration.setting import (
    COMPUTED,
    METHODS,
    STEPS,
    Setting,
    count_calls,
    fitted_plan,
    paper_plan,
    watch_steps,
)
from tests.integration.tiny import CASES, call_arguments, generate


def test_trajectory_on_flux(flux: Setting) -> None:
    policy = flux.trajectory_policy()
    denoise = flux_denoiser(flux.pipe, **call_arguments(flux.case))
    stepper = make_stepper(policy.default.plan)
    assert isinstance(stepper, TrajectoryStepper)
    expected = run(denoise, flux.run.latents[0], stepper, sigmas=flux.sigmas)
    with (
        attach(flux.pipe, policy),
        count_calls(flux.pipe.transformer) as calls,
        watch_steps(flux.pipe) as seen,
    ):
        assert torch.equal(flux.generate(), expected[-1])
        assert len(calls) == len(COMPUTED)
        assert all(map(torch.equal, seen.samples, expected))
        assert torch.equal(flux.generate(), expected[-1])  # and again
    assert not torch.equal(flux.run.latents[-1], expected[-1])


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
@pytest.mark.parametrize("scale", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("rectified", [True, False])
def test_paper_on_flux(flux: Setting, reuse: str, scale: float, rectified: bool) -> None:
    policy = flux.paper_policy(reuse=reuse, scale=scale, rectified=rectified)
    denoise, noise = flux_denoiser(flux.pipe, **call_arguments(flux.case)), flux.run.latents[0]

    def core(**solver: Any) -> Tensor:
        stepper = make_stepper(policy.default.plan)
        assert isinstance(stepper, PaperStepper)
        return run(denoise, noise, stepper, sigmas=flux.sigmas, **solver)[-1]

    with attach(flux.pipe, policy), count_calls(flux.pipe.transformer) as calls:
        result = flux.generate()
    assert torch.equal(result, core(solver=OriginalSteps))
    assert len(calls) == len(COMPUTED)
    # The Euler of core keeps its intervals in float64, the scheduler in float32.
    euler = core()
    torch.testing.assert_close(result, euler, rtol=0, atol=1e-4 * float(euler.abs().max()))


@pytest.mark.parametrize("method", METHODS)
def test_a_stepper_that_is_given_is_the_one_that_runs(flux: Setting, method: str) -> None:
    """As calibration does: the policy is there for its sigmas and its fingerprint."""
    policy, expected = flux.policy_of(method)
    stepper = make_stepper(policy.default.plan)
    with Handle(flux.pipe, flux.paper_policy((0, 7), scale=1.0), stepper=stepper) as handle:
        assert torch.equal(flux.generate(), expected)
    assert handle.stats.last.computed_steps == len(COMPUTED)


def test_both_methods_on_the_bundled_model() -> None:
    """The trained weights, with real coefficients and with guidance in two calls per step."""
    pipe, steps, computed = load_pipeline("emoji-flux"), 8, (0, 1, 3, 6, 7)
    call = MODELS["emoji-flux"].call_arguments | {
        "prompt": load_prompts("emoji-flux", "heldout")[0],
        "num_inference_steps": steps,
        "output_type": "latent",
    }

    def generate_latents() -> Tensor:
        result: Tensor = pipe(**call, generator=torch.Generator().manual_seed(7))[0]
        return result

    full = record(pipe, **call, generator=torch.Generator().manual_seed(7))
    sigmas, noise = full.schedule.sigmas, full.run.latents[0]
    gram, update = profile_run(full.run).gram, full.schedule.nominal
    (plan,) = fit_plans(gram, update, schedules=[computed], fit=Fit())
    denoise = flux_denoiser(pipe, **call)
    facts = fingerprint(pipe, latent_shape=noise.shape[1:], guidance=full.guidance)
    for made in (plan, paper_plan(sigmas, computed)):
        stepper = make_stepper(made)
        expected = run(denoise, noise, stepper, sigmas=sigmas, solver=OriginalSteps)[-1]
        with (
            attach(pipe, Policy(facts, plans=(fitted_plan(made, full.schedule),))),
            count_calls(pipe.transformer) as calls,
        ):
            assert torch.equal(generate_latents(), expected)
        assert len(calls) == 2 * len(computed)
        assert not torch.equal(expected, full.run.latents[-1])
    assert torch.equal(generate_latents(), full.run.latents[-1])


def test_trajectory_replays_recorded_outputs(setting: Setting) -> None:
    """Whatever the scheduler and the guidance: the plan's sums of the outputs the scheduler saw."""
    policy = setting.trajectory_policy()
    with (
        attach(setting.pipe, policy),
        watch_steps(setting.pipe) as seen,
        count_calls(setting.pipe.transformer) as calls,
    ):
        result = setting.generate()
    expected = replayed(policy.default, seen)
    for x, y in zip((*seen.samples, result), expected, strict=True):
        assert torch.equal(x, y)
    assert len(calls) == setting.branches * len(COMPUTED)


def test_paper_replays_recorded_outputs(setting: Setting) -> None:
    """On the nominal sigmas the output is substituted and the scheduler's own step is taken."""
    policy = setting.paper_policy(scale=1.0, rectified=False, reuse="velocity")
    with attach(setting.pipe, policy), watch_steps(setting.pipe) as seen:
        result = setting.generate()
    scheduler = type(setting.pipe.scheduler).from_config(setting.pipe.scheduler.config)
    scheduler.set_timesteps(STEPS)
    x, v = seen.samples[0], seen.outputs[0]
    if setting.case is CASES["flux"]:
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / STEPS, STEPS).tolist())
    for k, t in enumerate(scheduler.timesteps):
        v = seen.outputs[k] if k in COMPUTED else v
        x = scheduler.step(v, t, x, return_dict=False)[0]
    assert torch.equal(result, x)


@pytest.mark.parametrize("setting", ["flux", "cogvideox", "sd3"], indirect=True)
def test_all_steps_computed_with_the_first_order_update_is_the_full_run(setting: Setting) -> None:
    plan = TrajectoryPlan(tuple(range(STEPS)), setting.nominal[:, None])
    with attach(setting.pipe, setting.policy(plan)):
        result = setting.generate()
    # Not equal to the bit: ``add(v, alpha=a)`` rounds once, the schedulers' product and sum twice.
    torch.testing.assert_close(result, setting.run.latents[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(flux: Setting, dtype: torch.dtype) -> None:
    pipe = flux.another().pipe.to(dtype)
    policy = flux.trajectory_policy()
    plan = policy.default.plan
    assert isinstance(plan, TrajectoryPlan)
    with pytest.warns(UserWarning, match=r"dtype is '\w+16', was 'float32'"):
        handle = attach(pipe, policy)
    with handle, watch_steps(pipe) as seen:
        result = generate(pipe, flux.case)
    rows = plan.coefficients[:, 0].tolist()
    past: list[Tensor] = []
    for k, (x, v) in enumerate(zip(seen.samples, seen.outputs, strict=True)):
        past = [v, *past][:3] if k in COMPUTED else past
        expected = combine(x.float(), [v.float() for v in past], rows[k]).to(dtype)
        assert torch.equal(seen.results[k][0], expected)
    assert result.dtype == dtype
