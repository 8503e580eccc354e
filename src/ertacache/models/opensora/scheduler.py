"""RFLOW, the sampler of Open-Sora 1.2, as a diffusers scheduler.

Rectified flow: ``x = (1 - sigma) data + sigma noise``, and the network predicts data - noise, so
that a step adds the output. Euler steps on a sigma schedule that is shifted for large and long
videos.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

__all__ = ["RFlowScheduler", "RFlowSchedulerOutput", "shift_sigmas", "size_ratio"]

_MICRO_FRAMES, _MICRO_LATENTS, _COMPRESSION = 17, 5, 4


def size_ratio(height: int, width: int, num_frames: int, *, base_resolution: int = 512) -> float:
    """Size relative to one square image: ``sqrt(pixels / base**2) sqrt(latent frames)``.

    Frames beyond the last full 17 do not count, as in the published sampler. Of a shorter video,
    for which the published rule is undefined, all latent frames count.

    Example:
        >>> size_ratio(512, 512, 1), size_ratio(256, 256, 340)
        (1.0, 5.0)
    """
    if num_frames >= _MICRO_FRAMES:
        latent_frames = num_frames // _MICRO_FRAMES * _MICRO_LATENTS
    else:
        latent_frames = math.ceil(num_frames / _COMPRESSION)
    return math.sqrt(height * width) / base_resolution * math.sqrt(latent_frames)


def shift_sigmas(sigmas: Tensor, ratio: float) -> Tensor:
    """Shift noise levels towards noise: ``ratio s / (1 + (ratio - 1) s)``; 0 and 1 are fixed.

    Example:
        >>> shift_sigmas(torch.tensor([1.0, 0.5, 0.0]), 3.0)
        tensor([1.0000, 0.7500, 0.0000])
    """
    return ratio * sigmas / (1 + (ratio - 1) * sigmas)


@dataclass
class RFlowSchedulerOutput(BaseOutput):
    """Output of a step.

    Attributes:
        prev_sample: the latent of the next, less noisy step.
    """

    prev_sample: Tensor


class RFlowScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Euler steps of a rectified flow.

    Args:
        num_train_timesteps: the timestep of pure noise.
        use_timestep_transform: whether the sigma schedule depends on the size of the video.
        base_resolution: side in pixels of the square image whose schedule is not shifted.
        transform_scale: additional factor of the shift.

    Example:
        >>> scheduler = RFlowScheduler()
        >>> scheduler.set_timesteps(2, height=512, width=512, num_frames=1)
        >>> scheduler.timesteps
        tensor([1000.,  500.])
        >>> noise, velocity = torch.tensor([2.0]), torch.tensor([-1.0])
        >>> scheduler.step(velocity, scheduler.timesteps[0], noise).prev_sample
        tensor([1.5000])
    """

    order = 1

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        use_timestep_transform: bool = True,
        base_resolution: int = 512,
        transform_scale: float = 1.0,
    ) -> None:
        """Create a scheduler; ``set_timesteps`` sets its schedule."""
        self.num_inference_steps: int | None = None
        self.timesteps = torch.empty(0)
        self.sigmas = torch.empty(0)
        self._step_index: int | None = None
        self._begin_index: int | None = None

    @property
    def step_index(self) -> int | None:
        """The next step; None before the first."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """The first step of a run, if it was set."""
        return self._begin_index

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Set the first step of a run."""
        self._begin_index = begin_index

    def set_timesteps(
        self,
        num_inference_steps: int,
        device: str | torch.device | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
    ) -> None:
        """Set the sigma schedule of a run.

        Args:
            num_inference_steps: number of steps.
            device: device of the schedule.
            height: height of the video in pixels.
            width: width of the video in pixels.
            num_frames: frames of the video.

        Raises:
            ValueError: if the schedule depends on the size of the video and it is not given.
        """
        if num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1, got {num_inference_steps}")
        ratio = 1.0
        if self.config["use_timestep_transform"]:
            if height is None or width is None or num_frames is None:
                raise ValueError(
                    "the timesteps depend on the size of the video: pass height=, width= and "
                    "num_frames=, or create the scheduler with use_timestep_transform=False"
                )
            ratio = self.config["transform_scale"] * size_ratio(
                height, width, num_frames, base_resolution=self.config["base_resolution"]
            )
        uniform = torch.linspace(1, 0, num_inference_steps + 1, dtype=torch.float64)
        self.sigmas = shift_sigmas(uniform, ratio).to(device, torch.float32)
        self.timesteps = self.sigmas[:-1] * self.config["num_train_timesteps"]
        self.num_inference_steps = num_inference_steps
        self._step_index = self._begin_index = None

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        return_dict: bool = True,
    ) -> RFlowSchedulerOutput | tuple[Tensor]:
        """Take one step: ``x + (sigma - next sigma) v``, computed in float32.

        Args:
            model_output: the velocity v, guidance applied.
            timestep: an entry of ``timesteps``; looked up on the first step only.
            sample: the latent x.
            return_dict: whether to return the output class rather than a tuple.
        """
        if self._step_index is None:
            self._step_index = self._find(timestep)
        k = self._step_index
        length = self.sigmas[k] - self.sigmas[k + 1]
        moved = sample.float() + length * model_output.float()
        self._step_index = k + 1
        moved = moved.to(model_output.dtype)
        return RFlowSchedulerOutput(prev_sample=moved) if return_dict else (moved,)

    def _find(self, timestep: float | Tensor) -> int:
        if self._begin_index is not None:
            return self._begin_index
        found = (self.timesteps == timestep).nonzero()
        if not len(found):
            raise ValueError(f"{float(timestep)} is not a timestep of this run")
        return int(found[0])

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Mix data and noise: ``(1 - sigma) data + sigma noise``, one timestep per sample."""
        sigmas = timesteps.to(original_samples) / self.config["num_train_timesteps"]
        sigmas = sigmas.reshape(-1, *[1] * (original_samples.ndim - 1))
        noisy: Tensor = (1 - sigmas) * original_samples + sigmas * noise
        return noisy

    def __len__(self) -> int:
        """Return ``num_train_timesteps``, as diffusers schedulers do."""
        return int(self.config["num_train_timesteps"])
