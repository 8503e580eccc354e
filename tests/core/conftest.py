"""Profiles of the exactly solvable flows, made once per session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.gram import RunStatistics, profile_run
from ertacache.core.plan import TrajectoryPlan
from ertacache.core.sampler import run_trajectory
from ertacache.core.solver import Trajectory, run_reference


@dataclass(frozen=True)
class Bench:
    """A flow, its profile on calibration noise, and held-out noise with the full run's answer."""

    flow: GaussianRing
    sigmas: Tensor
    nominal: Tensor
    reference: Trajectory
    statistics: RunStatistics
    heldout: Tensor
    target: Tensor

    def error(self, plan: TrajectoryPlan) -> float:
        run = run_trajectory(self.flow.velocity, self.heldout, sigmas=self.sigmas, plan=plan)
        return rmse(run.latents[-1], self.target)


@cache
def bench(radius: float, width: float, num_steps: int, shift: float = 1.0) -> Bench:
    flow, sigmas = GaussianRing(radius, width), shifted_sigmas(num_steps, shift)
    noise = flow.noise(16 * 64, seed=0).view(16, 64, 2)
    heldout = flow.noise(2048, seed=1)
    reference = run_reference(flow.velocity, noise, sigmas=sigmas)
    target = run_reference(flow.velocity, heldout, sigmas=sigmas).latents[-1]
    d = sigmas.diff()
    nominal = torch.stack([torch.ones_like(d), d], dim=1)
    return Bench(flow, sigmas, nominal, reference, profile_run(reference), heldout, target)


@pytest.fixture(scope="session")
def mild() -> Bench:
    """Radius 2, width 0.3, 30 steps."""
    return bench(2.0, 0.3, 30)
