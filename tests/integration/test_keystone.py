"""The attached pipeline and the reference loops of ``core.sampler`` give the same latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from ertacache.core.gram import profile_run
from ertacache.core.plan import PaperPlan, TrajectoryPlan
from ertacache.core.sampler import combine, run_paper, run_trajectory
from ertacache.core.solve import Fit, fit_plans
from ertacache.formats.policy import Policy
from ertacache.integration import attach, fingerprint, nominal, record_run
from ertacache.models import MODELS, load_pipeline, load_prompts
from tests.integration.setting import (
    COMPUTED,
    STEPS,
    Setting,
    count_calls,
    paper_plan,
    watch_steps,
)
from tests.integration.tiny import CASES, call_arguments, generate


def flux_denoiser(pipe: Any, **call: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The pipeline's network, guided if the call is, with all but latent and time held fixed."""
    seen: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    pipe(**call | {"num_inference_steps": 1})
    hook.remove()

    @torch.no_grad()
    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        t = (sigma.float() * 1000).expand(len(x)).to(x.dtype)
        changes = {"hidden_states": x, "timestep": t / 1000}
        outputs = [pipe.transformer(**(arguments | changes))[0] for arguments in seen]
        v: Tensor = outputs[0]
        for away in outputs[1:]:
            v = away + call["true_cfg_scale"] * (v - away)
        return v

    return denoise


class Stock:
    """A FlowMatchEuler scheduler that nobody touched, on any table."""

    def __init__(self, sigmas: Tensor) -> None:
        self._scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
        self._scheduler.set_timesteps(sigmas=sigmas[:-1].tolist())
        self._scheduler.set_begin_index(0)

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        t = self._scheduler.timesteps[step]
        result: Tensor = self._scheduler.step(model_output, t, sample, return_dict=False)[0]
        return result


def test_trajectory_on_flux(flux: Setting) -> None:
    policy = flux.trajectory_policy()
    assert isinstance(policy.plan, TrajectoryPlan)
    denoise = flux_denoiser(flux.pipe, **call_arguments(flux.case))
    expected = run_trajectory(
        denoise, flux.run.latents[0], sigmas=flux.sigmas, plan=policy.plan
    ).latents[-1]
    with attach(flux.pipe, policy), count_calls(flux.pipe.transformer) as calls:
        assert torch.equal(flux.generate(), expected)
        assert len(calls) == len(COMPUTED)
        assert torch.equal(flux.generate(), expected)  # and again
    assert not torch.equal(flux.run.latents[-1], expected)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
@pytest.mark.parametrize("scale", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("rectified", [True, False])
def test_paper_on_flux(flux: Setting, reuse: str, scale: float, rectified: bool) -> None:
    policy = flux.paper_policy(reuse=reuse, scale=scale, rectified=rectified)
    assert isinstance(policy.plan, PaperPlan)
    denoise, noise = flux_denoiser(flux.pipe, **call_arguments(flux.case)), flux.run.latents[0]
    expected = run_paper(denoise, noise, plan=policy.plan, solver=Stock).latents[-1]
    with attach(flux.pipe, policy), count_calls(flux.pipe.transformer) as calls:
        result = flux.generate()
    assert torch.equal(result, expected)
    assert len(calls) == len(COMPUTED)
    # The Euler of core keeps its intervals in float64, the scheduler in float32.
    euler = run_paper(denoise, noise, plan=policy.plan).latents[-1]
    torch.testing.assert_close(result, euler, rtol=0, atol=1e-4 * float(euler.abs().max()))


def test_both_methods_on_the_bundled_model() -> None:
    """The trained weights, with real coefficients and with guidance in two calls per step."""
    pipe, steps, computed = load_pipeline("emoji-flux"), 12, (0, 1, 3, 6, 8, 11)
    call = MODELS["emoji-flux"].call_arguments | {
        "prompt": load_prompts("emoji-flux", "heldout")[0],
        "num_inference_steps": steps,
        "output_type": "latent",
    }

    def generate_latents() -> Tensor:
        result: Tensor = pipe(**call, generator=torch.Generator().manual_seed(7))[0]
        return result

    run, sigmas = record_run(pipe, **call, generator=torch.Generator().manual_seed(7))
    update = nominal(pipe.scheduler)
    (plan,) = fit_plans(profile_run(run), update, schedules=[computed], fit=Fit())
    paper = paper_plan(sigmas, computed)
    denoise, noise = flux_denoiser(pipe, **call), run.latents[0]
    expected = {
        plan: run_trajectory(denoise, noise, sigmas=sigmas, plan=plan),
        paper: run_paper(denoise, noise, plan=paper, solver=Stock),
    }
    facts = fingerprint(pipe, sigmas=sigmas, latent_shape=noise.shape[1:])
    for made, reference in expected.items():
        with (
            attach(pipe, Policy(made, sigmas, fingerprint=facts)),
            count_calls(pipe.transformer) as calls,
        ):
            assert torch.equal(generate_latents(), reference.latents[-1])
        assert len(calls) == 2 * len(computed)
        assert not torch.equal(reference.latents[-1], run.latents[-1])
    assert torch.equal(generate_latents(), run.latents[-1])


def test_trajectory_replays_recorded_outputs(setting: Setting) -> None:
    """Whatever the scheduler and the guidance: the plan's sums of the outputs the scheduler saw."""
    policy = setting.trajectory_policy()
    assert isinstance(policy.plan, TrajectoryPlan)
    with (
        attach(setting.pipe, policy),
        watch_steps(setting.pipe) as seen,
        count_calls(setting.pipe.transformer) as calls,
    ):
        result = setting.generate()
    outputs = iter(v for k, v in enumerate(seen.outputs) if k in COMPUTED)
    expected = run_trajectory(
        lambda x, sigma: next(outputs), seen.samples[0], sigmas=setting.sigmas, plan=policy.plan
    )
    for k, x in enumerate(seen.samples):
        assert torch.equal(x, expected.latents[k])
    assert torch.equal(result, expected.latents[-1])
    branches = 2 if setting.case is CASES["wan"] else 1
    assert len(calls) == branches * len(COMPUTED)


def test_paper_replays_recorded_outputs(setting: Setting) -> None:
    """On the nominal table the output is substituted and the scheduler's own step is taken."""
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
def test_all_steps_computed_with_the_nominal_update_is_the_untouched_run(setting: Setting) -> None:
    plan = TrajectoryPlan(tuple(range(STEPS)), setting.nominal[:, 0], setting.nominal[:, 1:])
    with attach(setting.pipe, setting.policy(plan)):
        result = setting.generate()
    # Not equal to the bit: ``add(v, alpha=a)`` rounds once, the schedulers' product and sum twice.
    torch.testing.assert_close(result, setting.run.latents[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(flux: Setting, dtype: torch.dtype) -> None:
    pipe = CASES["flux"].build().to(dtype)
    policy = flux.trajectory_policy()
    assert isinstance(policy.plan, TrajectoryPlan)
    with pytest.warns(UserWarning, match=r"dtype is '\w+16', was 'float32'"):
        handle = attach(pipe, policy)
    with handle, watch_steps(pipe) as seen:
        result = generate(pipe, flux.case)
    rows = torch.cat([policy.plan.latent[:, None], policy.plan.outputs], dim=1).tolist()
    past: list[Tensor] = []
    for k, (x, v) in enumerate(zip(seen.samples, seen.outputs, strict=True)):
        past = [v, *past][:3] if k in COMPUTED else past
        expected = combine(x.float(), [v.float() for v in past], rows[k]).to(dtype)
        assert torch.equal(seen.results[k][0], expected)
    assert result.dtype == dtype
