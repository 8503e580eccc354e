"""What a denoiser is trained to predict, and how its prediction splits into data and noise.

A noisy latent is ``a * data + s * noise``. Both objectives here name the two factors at a noise
level, draw levels for training, and turn a prediction back into data and noise, which is all that
a deterministic sampler needs. Knows nothing of networks or of emoji.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from diffusers import CogVideoXDDIMScheduler
from torch import Tensor

__all__ = ["Flow", "Objective", "VPrediction", "loss", "sample"]

_LOGIT_MEAN, _LOGIT_STD = 0.4, 1.2  # levels of a flow: logit-normal, towards the noisy end


class Objective(Protocol):
    """A way to noise data, and the quantity that undoes it."""

    def draw(self, count: int) -> Tensor:
        """Noise levels of a training batch, in the units that the network is given."""

    def path(self, steps: int) -> Tensor:
        """Levels of a sampling run, from pure noise on, shape (steps + 1,)."""

    def factors(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of data and noise at a level."""

    def target(self, data: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """What the network has to predict."""

    def split(self, noisy: Tensor, predicted: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        """Data and noise that a prediction implies."""


class Flow:
    """Rectified flow: a straight line from data to noise, predict its direction."""

    def __init__(self, shift: float, *, scale: float = 1.0, sign: float = 1.0) -> None:
        """Describe the sampler.

        Args:
            shift: Shift of its levels.
            scale: What one unit of level is to the network.
            sign: 1 for a network that predicts noise minus data, -1 for data minus noise.
        """
        self.shift, self.scale, self.sign = shift, scale, sign

    def draw(self, count: int) -> Tensor:
        """Logit-normal levels."""
        return self.scale * torch.sigmoid(_LOGIT_MEAN + _LOGIT_STD * torch.randn(count))

    def path(self, steps: int) -> Tensor:
        """Shifted levels from one to zero."""
        u = torch.linspace(1, 0, steps + 1)
        return self.scale * self.shift * u / (1 + (self.shift - 1) * u)

    def factors(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Data fades linearly while noise grows."""
        return 1 - level / self.scale, level / self.scale

    def target(self, data: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """Noise minus data, or the other way round."""
        return self.sign * (noise - data)

    def split(self, noisy: Tensor, predicted: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        """Follow the line to either end."""
        direction = self.sign * predicted
        return noisy - s * direction, noisy + a * direction


class VPrediction:
    """Variance preserving noise at the levels of a DDIM scheduler, predict the angular velocity."""

    def __init__(self, scheduler: CogVideoXDDIMScheduler) -> None:
        """Take the noise levels from the scheduler of the pipeline; the last entry is data."""
        self.levels = torch.cat([scheduler.alphas_cumprod.float(), torch.ones(1)])

    def draw(self, count: int) -> Tensor:
        """Uniform timesteps."""
        return torch.randint(len(self.levels) - 1, (count,))

    def path(self, steps: int) -> Tensor:
        """Trailing timesteps, then -1, which is data."""
        return torch.linspace(len(self.levels) - 2, -1, steps + 1).round().long()

    def factors(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Roots of the share of data and of noise."""
        share = self.levels[level]
        return share.sqrt(), (1 - share).sqrt()

    def target(self, data: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """The derivative of the noisy latent with respect to the angle."""
        return a * noise - s * data

    def split(self, noisy: Tensor, predicted: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        """Turn back by the angle, or on to the right angle."""
        return a * noisy - s * predicted, s * noisy + a * predicted


def _columns(factors: tuple[Tensor, Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """Shape the factors of a batch so that they multiply latents."""
    return tuple(factor.view(-1, *(1,) * (like.ndim - 1)) for factor in factors)


def loss(objective: Objective, predict: Callable[[Tensor, Tensor], Tensor], data: Tensor) -> Tensor:
    """Mean squared error of the prediction at random levels."""
    level, noise = objective.draw(len(data)), torch.randn_like(data)
    a, s = _columns(objective.factors(level), data)
    predicted = predict(a * data + s * noise, level)
    return (predicted - objective.target(data, noise, a, s)).pow(2).mean()


@torch.no_grad()
def sample(
    objective: Objective, predict: Callable[[Tensor, Tensor], Tensor], noise: Tensor, *, steps: int
) -> Tensor:
    """Deterministic steps from noise to data: DDIM, which for a flow is Euler."""
    path, x = objective.path(steps), noise
    for before, after in itertools.pairwise(path):
        a, s = _columns(objective.factors(before[None]), x)
        data, rest = objective.split(x, predict(x, before.expand(len(x))), a, s)
        a, s = _columns(objective.factors(after[None]), x)
        x = a * data + s * rest
    return x
