"""Solvers that stand for schedulers other than Euler's, and the schedules of their runs."""

from __future__ import annotations

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from ertacache.core.gram import Schedule
from ertacache.core.sampler import Euler, SolverFactory


def schedule_of(
    sigmas: Tensor,
    *,
    solver: SolverFactory = Euler,
    nominal: Tensor | None = None,
    begun: bool = True,
) -> Schedule:
    """The schedule of a solver's full run; its latents by a run on unit vectors."""
    units = torch.eye(len(sigmas), dtype=torch.float64)
    steps, rows = solver(sigmas), [units[0]]
    for k, output in enumerate(units[1:]):
        rows.append(steps.step(output, k, rows[-1]))
    update = euler_update(sigmas) if nominal is None else nominal
    return Schedule(sigmas, update, torch.stack(rows), torch.ones_like(sigmas), begun)


class LinearSolver:
    """``x[k+1] = latent[k] x[k] + sum_j outputs[k, j] v[k-j]``; shapes (T,) and (T, M)."""

    def __init__(self, latent: Tensor, outputs: Tensor) -> None:
        self._latent: list[float] = latent.tolist()
        self._outputs: list[list[float]] = outputs.tolist()
        self._past: list[Tensor] = []

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        weights = self._outputs[step]
        self._past = [model_output, *self._past][: len(weights)]
        x = self._latent[step] * sample
        for b, v in zip(weights, self._past, strict=False):
            x = x + b * v
        return x


class AdamsBashforth(LinearSolver):
    """Second order on a non-uniform sigma schedule; the first step is Euler's."""

    def __init__(self, sigmas: Tensor) -> None:
        d = sigmas.double().diff()
        ratio = torch.zeros_like(d)
        # After a step of no length the last two outputs define no slope: Euler's step again.
        ratio[1:] = torch.where(d[:-1] == 0, 0.0, d[1:] / d[:-1])
        outputs = torch.stack([d * (1 + ratio / 2), -d * ratio / 2], dim=1)
        super().__init__(torch.ones_like(d), outputs)


def euler_update(sigmas: Tensor) -> Tensor:
    """The first-order update of solvers that do not scale the latent, shape (T, 2)."""
    d = sigmas.diff()
    return torch.stack([torch.ones_like(d), d], dim=1)


def ddim_update(sigmas: Tensor) -> Tensor:
    """The update of DDIM, which scales the latent, shape (T, 2)."""
    alpha, sigma = torch.cos(sigmas * torch.pi / 2), torch.sin(sigmas * torch.pi / 2)
    c = alpha[1:] * alpha[:-1] + sigma[1:] * sigma[:-1]
    b = sigma[1:] * alpha[:-1] - alpha[1:] * sigma[:-1]
    return torch.stack([c, b], dim=1)


def ddim(sigmas: Tensor) -> LinearSolver:
    nominal = ddim_update(sigmas)
    return LinearSolver(nominal[:, 0], nominal[:, 1:])


class UniPC:
    """The multistep scheduler of Wan, as a solver."""

    def __init__(self, sigmas: Tensor) -> None:
        self.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        self.scheduler.set_timesteps(len(sigmas) - 1)

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        time = self.scheduler.timesteps[step]
        result: Tensor = self.scheduler.step(model_output, time, sample, return_dict=False)[0]
        return result
