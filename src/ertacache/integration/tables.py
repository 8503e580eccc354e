"""Sigma tables: read off a scheduler, compared, and replaced by an adjusted one.

Knows the tables of schedulers, not their steps; knows no policy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ertacache.integration.compat import Scheduler, final_alpha
from ertacache.integration.errors import SchedulerError

__all__ = ["install_sigmas", "read_sigmas", "table_distance", "variance_preserving_update"]


def read_sigmas(scheduler: Scheduler) -> Tensor:
    """Return the sigma table of a scheduler after ``set_timesteps``, strictly descending.

    A scheduler's own ``sigmas`` are taken as they are; an ascending table (Mochi) as
    ``1 - sigmas``. A scheduler that has only ``alphas_cumprod`` (DDIM and CogVideoX DDIM) adds
    noise as ``a x + s n`` with ``a**2 = alphas_cumprod`` and ``a**2 + s**2 = 1``; its table is
    ``s / (a + s)`` at the timesteps, which is 1 for pure noise, 0 for none, and the sigma of a flow
    with the same ratio of noise.

    Returns:
        The table, shape (T + 1,), float64, on the CPU.

    Raises:
        SchedulerError: if the table does not descend at every step.
    """
    own = getattr(scheduler, "sigmas", None)
    if isinstance(own, Tensor):
        sigmas = own.detach().to("cpu", torch.float64)
        sigmas = 1 - sigmas if bool(sigmas[0] < sigmas[-1]) else sigmas
    elif hasattr(scheduler, "alphas_cumprod"):
        alphas = _alphas_cumprod(scheduler)[scheduler.timesteps.to("cpu", torch.int64)]
        sigmas = _noise_share(torch.cat([alphas, alphas.new_tensor([final_alpha(scheduler)])]))
    else:
        raise SchedulerError(
            f"{type(scheduler).__name__} has no table of noise levels, which every policy follows: "
            "use a scheduler with sigmas or alphas_cumprod, such as DDIMScheduler"
        )
    if len(sigmas) != len(scheduler.timesteps) + 1 or bool((sigmas.diff() >= 0).any()):
        raise SchedulerError(
            f"the noise levels of {type(scheduler).__name__} do not descend at every step: "
            "choose another timestep_spacing or final_sigmas_type, or DDIMScheduler"
        )
    return sigmas


def table_distance(sigmas: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tables of one length, relative to the first's range.

    Example:
        >>> table_distance(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, 1.5, 0.0]))
        0.25
    """
    return ((sigmas - other).abs().max() / (sigmas[0] - sigmas[-1])).item()


def install_sigmas(scheduler: Any, sigmas: Tensor) -> None:
    """Replace the table that ``set_timesteps`` just made, and the timesteps with it.

    Timesteps follow by interpolation, so that entries that stay keep their timestep exactly.
    """
    nominal, own = read_sigmas(scheduler), getattr(scheduler, "sigmas", None)
    if not isinstance(own, Tensor):
        levels = _noise_share(_alphas_cumprod(scheduler)).flip(0)
        times = torch.arange(len(levels) - 1, -1, -1, dtype=torch.float64)
        scheduler.timesteps = (
            _interpolate(sigmas[:-1], levels, times).round().to(scheduler.timesteps)
        )
        return
    table = (1 - sigmas if bool(own[0] < own[-1]) else sigmas).to(own.device, own.dtype)
    scale = scheduler.config.get("num_train_timesteps", 1)
    if torch.equal(scheduler.timesteps, own[:-1] * scale):  # flows: the same rule, to the bit
        scheduler.timesteps = table[:-1] * scale
    else:
        times = scheduler.timesteps.to("cpu", torch.float64)
        moved = _interpolate(sigmas[:-1], nominal[:-1], times)
        whole = not scheduler.timesteps.is_floating_point()
        scheduler.timesteps = (moved.round() if whole else moved).to(scheduler.timesteps)
    scheduler.sigmas = table


def variance_preserving_update(sigmas: Tensor, prediction_type: str) -> Tensor:
    """DDIM between any two entries of a table ``s / (a + s)``: ``x' = c x + b v``, shape (T, 2).

    Example:
        >>> variance_preserving_update(torch.tensor([0.5, 0.0]), "sample")
        tensor([[0., 1.]])
    """
    norm = torch.hypot(sigmas, 1 - sigmas)
    a, s = (1 - sigmas) / norm, sigmas / norm
    a, s, a_next, s_next = a[:-1], s[:-1], a[1:], s[1:]
    if prediction_type == "v_prediction":
        return torch.stack([a * a_next + s * s_next, a * s_next - s * a_next], dim=1)
    if prediction_type == "epsilon":
        return torch.stack([a_next / a, s_next - s * a_next / a], dim=1)
    if prediction_type == "sample":
        return torch.stack([s_next / s, a_next - a * s_next / s], dim=1)
    raise SchedulerError(f"prediction_type {prediction_type!r} has no known update")


def _alphas_cumprod(scheduler: Any) -> Tensor:
    alphas: Tensor = scheduler.alphas_cumprod
    return alphas.detach().to("cpu", torch.float64)


def _noise_share(alphas_cumprod: Tensor) -> Tensor:
    a, s = alphas_cumprod.sqrt(), (1 - alphas_cumprod).clamp_min(0).sqrt()
    return s / (a + s)


def _interpolate(at: Tensor, levels: Tensor, times: Tensor) -> Tensor:
    """Piecewise linear in a strictly descending ``levels``; beyond its ends, the last piece."""
    if len(levels) == 1:
        return times.expand(len(at))
    right = torch.searchsorted(-levels, -at).clamp(1, len(levels) - 1)
    left = right - 1
    share = (at - levels[left]) / (levels[right] - levels[left])
    return times[left] + share * (times[right] - times[left])
