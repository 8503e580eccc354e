"""Exactly solvable flows: closed-form velocities of ``x_s = (1 - s) x0 + s noise``.

A network whose outputs are known: for examples, tests and the figure of the trajectories.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["GaussianRing", "rmse", "shifted_sigmas"]


class GaussianRing:
    """Equal Gaussians of one width, evenly placed on a circle in the plane.

    Example:
        >>> flow = GaussianRing(radius=2.0, width=0.3)
        >>> flow.velocity(torch.zeros(1, 2, dtype=torch.float64), 1.0).abs().max() < 1e-12
        tensor(True)
    """

    def __init__(self, radius: float, width: float, modes: int = 8) -> None:
        """Place the modes."""
        self.width = width
        angles = torch.arange(modes, dtype=torch.float64) * (2 * math.pi / modes)
        self.means = radius * torch.stack([angles.cos(), angles.sin()], dim=1)

    def velocity(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        """``E[noise - x0 | x_sigma = x]`` for x of shape (..., 2).

        Per mode m, ``x - (1 - s) mu_m`` has variance ``q = s^2 + (1 - s)^2 w^2``, of which the
        noise takes the share s / q and x0 - mu_m the share (1 - s) w^2 / q. No division by s.
        """
        s = torch.as_tensor(sigma, dtype=x.dtype)
        mu = self.means.to(x.dtype)
        q = s**2 + (1 - s) ** 2 * self.width**2
        centred = x[..., None, :] - (1 - s) * mu
        weights = torch.softmax(centred.square().sum(-1) / (-2 * q), dim=-1)
        per_mode = (s - (1 - s) * self.width**2) / q * centred - mu
        return (weights[..., None] * per_mode).sum(-2)

    def noise(self, count: int, seed: int) -> Tensor:
        """``count`` starting points of shape (count, 2), float64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, 2, generator=generator, dtype=torch.float64)


def shifted_sigmas(num_steps: int, shift: float = 3.0) -> Tensor:
    """Sigmas of flow models: ``shift s / (1 + (shift - 1) s)`` of a uniform s."""
    s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return shift * s / (1 + (shift - 1) * s)


def rmse(a: Tensor, b: Tensor) -> float:
    """Root of the mean squared difference."""
    return (a - b).square().mean().sqrt().item()
