"""The loop of ``core.sampler`` over the network of a pipeline, which attached runs must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from ertacache.core.sampler import run
from ertacache.core.steppers import make_stepper
from ertacache.formats.fitted import FittedPlan
from tests.integration.setting import Seen


def flux_denoiser(pipe: Any, **call: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The network of a pipeline, guided if the call is; all but latent and time is fixed."""
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


class OriginalSteps:
    """The steps of a FlowMatchEuler scheduler without a policy, on any sigmas."""

    def __init__(self, sigmas: Tensor) -> None:
        self._scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
        self._scheduler.set_timesteps(sigmas=sigmas[:-1].tolist())
        self._scheduler.set_begin_index(0)

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        t = self._scheduler.timesteps[step]
        result: Tensor = self._scheduler.step(model_output, t, sample, return_dict=False)[0]
        return result


def replayed(plan: FittedPlan | None, seen: Seen) -> tuple[Tensor, ...]:
    """The core loop with the plan's stepper, over the outputs that the scheduler saw."""
    assert plan is not None
    assert len(seen.outputs) == plan.num_steps
    outputs = iter([seen.outputs[k] for k in plan.compute_steps])
    stepper = make_stepper(plan.plan)
    return run(lambda x, sigma: next(outputs), seen.samples[0], stepper, sigmas=plan.sigmas)
