"""Sampler functions in the form that k-diffusion and ComfyUI have: a model that returns x0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _tell(callback: Any, i: int, x: Tensor, sigma: Tensor, x0: Tensor) -> None:
    if callback is not None:
        callback({"i": i, "x": x, "sigma": sigma, "sigma_hat": sigma, "denoised": x0})


def euler(
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Any = None,
    callback: Any = None,
    disable=None,
) -> Tensor:
    for i in range(len(sigmas) - 1):
        x0 = model(x, sigmas[i] * x.new_ones(len(x)), **(extra_args or {}))
        _tell(callback, i, x, sigmas[i], x0)
        x = x + (x - x0) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def dpmpp_2m(
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Any = None,
    callback: Any = None,
    disable=None,
) -> Tensor:
    before = None
    for i in range(len(sigmas) - 1):
        x0 = model(x, sigmas[i] * x.new_ones(len(x)), **(extra_args or {}))
        _tell(callback, i, x, sigmas[i], x0)
        now, ratio, used = sigmas[i], sigmas[i + 1] / sigmas[i], x0
        if before is not None and sigmas[i + 1] > 0:
            r = torch.log(sigmas[i - 1] / now) / torch.log(now / sigmas[i + 1])
            used = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * before
        x, before = ratio * x + (1 - ratio) * used, x0
    return x


def dpm_2(
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Any = None,
    callback: Any = None,
    disable=None,
) -> Tensor:
    """Two evaluations per interval, the second at its geometric middle."""
    for i in range(len(sigmas) - 1):
        ones = x.new_ones(len(x))
        x0 = model(x, sigmas[i] * ones, **(extra_args or {}))
        _tell(callback, i, x, sigmas[i], x0)
        d = (x - x0) / sigmas[i]
        if sigmas[i + 1] > 0:
            middle = (sigmas[i] * sigmas[i + 1]).sqrt()
            y = x + d * (middle - sigmas[i])
            d = (y - model(y, middle * ones, **(extra_args or {}))) / middle
        x = x + d * (sigmas[i + 1] - sigmas[i])
    return x


def heun(model: Any, x: Tensor, sigmas: Tensor, **unused: Any) -> Tensor:
    """Two evaluations at one noise level."""
    for i in range(len(sigmas) - 1):
        ones, h = x.new_ones(len(x)), sigmas[i + 1] - sigmas[i]
        d = (x - model(x, sigmas[i] * ones)) / sigmas[i]
        if sigmas[i + 1] > 0:
            y = x + h * d
            d = (d + (y - model(y, sigmas[i + 1] * ones)) / sigmas[i + 1]) / 2
        x = x + h * d
    return x


def ancestral(model: Any, x: Tensor, sigmas: Tensor, **unused: Any) -> Tensor:
    for i in range(len(sigmas) - 1):
        x0 = model(x, sigmas[i] * x.new_ones(len(x)))
        x = x0 + sigmas[i + 1] * torch.randn_like(x)
    return x


def clipping(model: Any, x: Tensor, sigmas: Tensor, **unused: Any) -> Tensor:
    for i in range(len(sigmas) - 1):
        x0 = model(x, sigmas[i] * x.new_ones(len(x))).clamp(-1, 1)
        x = x0 + (x - x0) * sigmas[i + 1] / sigmas[i]
    return x


def endless(model: Any, x: Tensor, sigmas: Tensor, **unused: Any) -> Tensor:
    while True:
        x = x - model(x, sigmas[0] * x.new_ones(len(x)))


def reading(model: Any, x: Tensor, sigmas: Tensor, **unused: Any) -> Tensor:
    """Asks the model what it is, as ComfyUI's samplers for flows do."""
    return euler(model, x, sigmas) if model.inner_model.kind == "flow" else x


def karras(num_steps: int, low: float = 0.03, high: float = 14.6, rho: float = 7.0) -> Tensor:
    """Sigmas of Karras et al. (2022), with a 0 at their end."""
    ramp = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    ends = high ** (1 / rho), low ** (1 / rho)
    return torch.cat([(ends[0] + ramp * (ends[1] - ends[0])) ** rho, torch.zeros(1).double()])
