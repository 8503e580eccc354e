"""Conditioning on frames: the first of a video, both ends, any of them.

A latent frame of strength 1 is kept; one of strength 0 is generated; in between it is kept at
first, gets its noise at a later timestep, and is generated from there.
"""

from __future__ import annotations

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ertacache.models.opensora.scheduler import RFlowScheduler

__all__ = ["FrameConditioning", "Generators"]

Generators = torch.Generator | list[torch.Generator] | None
"""One generator, one per video, or None for the global one."""


class FrameConditioning:
    """The frames that a run generates at each step.

    Example:
        >>> video, noise = torch.ones(1, 1, 2, 1, 1), torch.zeros(1, 1, 2, 1, 1)
        >>> scheduler = RFlowScheduler()
        >>> frames = FrameConditioning(video, torch.tensor([[1.0, 0.0]]), scheduler=scheduler)
        >>> frames.begin(noise).flatten()
        tensor([1., 0.])
        >>> frames.generated(torch.tensor(900.0))
        tensor([[False,  True]])
    """

    def __init__(
        self,
        latents: Tensor,
        strength: Tensor,
        *,
        scheduler: RFlowScheduler,
        generator: Generators = None,
    ) -> None:
        """Keep frames of ``latents`` (batch, channels, frames, height, width).

        Args:
            latents: the frames, normalised; those of strength 0 are ignored.
            strength: shape (batch, frames), in [0, 1].
            scheduler: adds the noise of a timestep.
            generator: draws that noise.
        """
        if bool(((strength < 0) | (strength > 1)).any()):
            raise ValueError("the conditioning mask must be between 0 (generate) and 1 (keep)")
        self._given, self._strength = latents, strength
        self._scheduler, self._generator = scheduler, generator
        self._last = (1 - strength) * scheduler.config["num_train_timesteps"]
        self._noisy = strength == 0

    @classmethod
    def of(
        cls,
        noise: Tensor,
        *,
        latents: Tensor | None,
        strength: Tensor | None,
        scheduler: RFlowScheduler,
        generator: Generators = None,
    ) -> FrameConditioning | None:
        """Return the conditioning of a run that starts from ``noise``; None if nothing is given.

        Latents and strengths without a batch dimension, or with one of 1, apply to every video.
        """
        if strength is None or not bool(strength.any()):
            if latents is not None:
                raise ValueError("conditioning_latents need a conditioning_mask: 1 for each frame")
            return None
        if latents is None:
            raise ValueError("a conditioning_mask needs conditioning_latents with the frames")
        frames = torch.Size([noise.shape[0], noise.shape[2]])
        given = _expand(latents.to(noise), noise.shape, "conditioning_latents")
        strength = _expand(strength.to(noise), frames, "conditioning_mask")
        return cls(given, strength, scheduler=scheduler, generator=generator)

    def begin(self, noise: Tensor) -> Tensor:
        """Return the initial latents: the given frames, and noise elsewhere."""
        return torch.where(_wide(self._strength > 0), self._given, noise)

    def generated(self, timestep: Tensor) -> Tensor:
        """Mask of the frames that are generated at a timestep, shape (batch, frames)."""
        # Strength 0 is a case of its own: timesteps may round to above 1000.
        return torch.logical_or(self._strength == 0, self._last >= timestep)

    def enter(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Add noise to the frames whose generation starts at this timestep."""
        now = self.generated(timestep)
        started = now & ~self._noisy
        self._noisy = now
        if not bool(started.any()):
            return latents
        noise = randn_tensor(
            latents.shape, generator=self._generator, device=latents.device, dtype=latents.dtype
        )
        noisy: Tensor = self._scheduler.add_noise(latents, noise, timestep[None])
        return torch.where(_wide(started), noisy, latents)

    def leave(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the latents after a step, kept frames unchanged."""
        return torch.where(_wide(self._noisy), after, before)


def _expand(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Expand to ``shape``; only the batch dimension may be missing or 1."""
    each = torch.Size(shape[1:])
    if tensor.shape not in (each, torch.Size([1, *each]), shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    return tensor.expand(shape)


def _wide(mask: Tensor) -> Tensor:
    return mask[:, None, :, None, None]
