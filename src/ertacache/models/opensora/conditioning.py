"""Frames that are given rather than generated: the first of a video, both ends, any of them.

A latent frame with a strength of 1 is kept as it is; with a strength of 0 it is generated; between
them it is kept at first, gets its noise late, and is generated from there. Knows nothing of
networks or text.
"""

from __future__ import annotations

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ertacache.models.opensora.scheduler import RFlowScheduler

__all__ = ["FrameConditioning", "Generators"]

Generators = torch.Generator | list[torch.Generator] | None
"""One generator, one per video, or the global one."""


class FrameConditioning:
    """Which frames a run generates at which step.

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
            latents: the frames, normalised; those with a strength of 0 do not matter.
            strength: shape (batch, frames), in [0, 1].
            scheduler: tells how noise is added at a timestep.
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
        """Return the conditioning of a run that begins with ``noise``; None if nothing is given.

        Latents and strengths of one video, or of one for all, are those of every video.
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
        """Return the first latents: what is given, and noise elsewhere."""
        return torch.where(_wide(self._strength > 0), self._given, noise)

    def generated(self, timestep: Tensor) -> Tensor:
        """Tell which frames are generated at a timestep, shape (batch, frames)."""
        # A frame without any strength is asked for by itself: timesteps round to above 1000.
        return torch.logical_or(self._strength == 0, self._last >= timestep)

    def enter(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Give noise to the frames that begin to be generated at this timestep."""
        now = self.generated(timestep)
        begun = now & ~self._noisy
        self._noisy = now
        if not bool(begun.any()):
            return latents
        noise = randn_tensor(
            latents.shape, generator=self._generator, device=latents.device, dtype=latents.dtype
        )
        noisy: Tensor = self._scheduler.add_noise(latents, noise, timestep[None])
        return torch.where(_wide(begun), noisy, latents)

    def leave(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the latents after a step, with kept frames as they were before."""
        return torch.where(_wide(self._noisy), after, before)


def _expand(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Repeat what is given once for all videos; everything else must fit."""
    each = torch.Size(shape[1:])
    if tensor.shape not in (each, torch.Size([1, *each]), shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    return tensor.expand(shape)


def _wide(mask: Tensor) -> Tensor:
    return mask[:, None, :, None, None]
