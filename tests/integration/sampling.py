"""A pipeline of ten lines for schedulers that no tiny pipeline here brings along."""

from __future__ import annotations

from typing import Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn

from ertacache.core.gram import Schedule, Trajectory, profile_run
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.identity import fingerprint
from ertacache.integration.record import record
from ertacache.integration.schedulers import read_schedule
from tests.integration.setting import fitted_plan

STEPS = 10


class Field(nn.Module):
    """A smooth network: a small rotation that changes with time."""

    config: ClassVar[dict[str, Any]] = {"kind": "field"}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            0.3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
        )
        self.calls = 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x @ self.weight * (1 + t / 1000))


class Sampling:
    """What all pipelines do: set the timesteps, then network and step in turns."""

    shape: tuple[int, ...] = (2, 3, 4)

    def __init__(self, scheduler: Any, network: nn.Module | None = None) -> None:
        self.scheduler, self.guidance_scale = scheduler, 1.0
        self.unet: Any = Field() if network is None else network

    @torch.no_grad()
    def __call__(
        self,
        *,
        num_inference_steps: int = STEPS,
        levels: dict[str, Any] | None = None,
        seed: int = 0,
        start: int = 0,
        announced: bool = False,
        latents: Tensor | None = None,
        **extra: Any,
    ) -> Tensor:
        extra.pop("output_type", None)
        # Sigmas, timesteps or a shift of the caller.
        self.scheduler.set_timesteps(**levels or {"num_inference_steps": num_inference_steps})
        if announced:
            self.scheduler.set_begin_index(start)
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))
        x = noise * getattr(self.scheduler, "init_noise_sigma", 1.0) if latents is None else latents
        for t in self.scheduler.timesteps[start:]:
            x_in = x
            if hasattr(self.scheduler, "scale_model_input"):
                x_in = self.scheduler.scale_model_input(x, t)
            x = self.scheduler.step(self.unet(x_in, t), t, x, **extra).prev_sample
        return x

    def record(self, **call: Any) -> tuple[Trajectory, Tensor]:
        """Latents and outputs of a full run, and its sigmas."""
        full = record(self, **call)
        return full.run, full.schedule.sigmas

    def schedule(self, num_inference_steps: int = STEPS, *, begin: int = 0) -> Schedule:
        """That of runs, read off the scheduler."""
        self.scheduler.set_timesteps(num_inference_steps)
        return read_schedule(self.scheduler, begin=begin)

    def policy(self, *plans: Any, **changes: Any) -> Policy:
        """A policy with plans for runs of ten steps."""
        fitted = tuple(fitted_plan(plan, self.schedule()) for plan in plans)
        return Policy(fingerprint(self, latent_shape=self.shape[1:]), plans=fitted, **changes)

    def profile(self, **call: Any) -> Profile:
        full = record(self, **call)
        prompts = tuple(ProfiledPrompt("", seed) for seed in range(len(full.run.latents[0])))
        return Profile(full.schedule, profile_run(full.run), prompts, full.expert_steps)


DETERMINISTIC: dict[str, dict[str, Any]] = {
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0},
    "UniPCMultistepScheduler": {
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
    },
    "CogVideoXDDIMScheduler": {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    },
    "DDIMScheduler": {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1},
    "DPMSolverMultistepScheduler": {},
    "EulerDiscreteScheduler": {},
}


def make(name: str, **config: Any) -> Any:
    return getattr(diffusers, name)(**(DETERMINISTIC.get(name, {}) | config))
