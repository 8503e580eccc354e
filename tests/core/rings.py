"""Exactly solvable flows with their profiles, and plans and measurements on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.frontier import FrontierPoint, solve_frontier
from ertacache.core.gram import Gram, RunStatistics, Trajectory, profile_run
from ertacache.core.paper_steppers import GainFit, ThresholdSearch
from ertacache.core.plans import PaperPlan, Reuse, TrajectoryPlan
from ertacache.core.sampler import Denoise, Euler, SolverFactory, run, run_reference
from ertacache.core.simulate import Fit, System, schedule_mask
from ertacache.core.steppers import RefitStepper, TrajectoryStepper
from tests.core.solvers import euler_update


@dataclass(frozen=True)
class Bench:
    """A flow, its profile on calibration noise, and held-out noise with its full run's result."""

    flow: GaussianRing
    sigmas: Tensor
    nominal: Tensor
    reference: Trajectory
    statistics: RunStatistics
    heldout: Tensor
    target: Tensor

    @property
    def gram(self) -> Gram:
        return self.statistics.gram

    def error(self, plan: TrajectoryPlan) -> float:
        latents = run(self.flow.velocity, self.heldout, TrajectoryStepper(plan), sigmas=self.sigmas)
        return rmse(latents[-1], self.target)


@cache
def bench(radius: float, width: float, num_steps: int, shift: float = 1.0) -> Bench:
    flow, sigmas = GaussianRing(radius, width), shifted_sigmas(num_steps, shift)
    noise = flow.noise(16 * 64, seed=0).view(16, 64, 2)
    heldout = flow.noise(2048, seed=1)
    reference = run_reference(flow.velocity, noise, sigmas=sigmas)
    target = run_reference(flow.velocity, heldout, sigmas=sigmas).latents[-1]
    statistics = profile_run(reference)
    return Bench(flow, sigmas, euler_update(sigmas), reference, statistics, heldout, target)


@cache
def solved_third(
    radius: float, width: float, num_steps: int, shift: float = 1.0
) -> tuple[Bench, FrontierPoint]:
    """A flow and its solved point with a third of the steps computed."""
    flow = bench(radius, width, num_steps, shift)
    return flow, solve_frontier(flow.gram, flow.nominal, budgets=[num_steps // 3]).points[0]


class Counted:
    """A network that counts its evaluations."""

    def __init__(self, denoise: Denoise) -> None:
        self.denoise = denoise
        self.calls = 0

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.calls += 1
        return self.denoise(x, sigma)


def plain_plan(sigmas: Tensor, compute_steps: Sequence[int]) -> TrajectoryPlan:
    """Plain reuse of the last output under Euler, as a plan."""
    return TrajectoryPlan(tuple(compute_steps), euler_update(sigmas.double())[:, None])


def refitted(
    denoise: Denoise,
    latents: Sequence[Tensor],
    *,
    sigmas: Tensor,
    compute_steps: Sequence[int],
    nominal: Tensor,
    fit: Fit | None = None,
) -> TrajectoryPlan:
    """The closed-loop refit of a compute schedule on the noise of the reference latents."""
    stepper = RefitStepper(latents, compute_steps=compute_steps, nominal=nominal, fit=fit or Fit())
    run(denoise, latents[0], stepper, sigmas=sigmas)
    return stepper.plan()


def predicted_errors(
    gram: Gram, nominal: Tensor, *, plan: TrajectoryPlan, sensitivity: float = 1.0
) -> Tensor:
    """Expected distance of each prompt's latents to its reference ones, shape (P, T + 1)."""
    P = len(gram.products)
    fit = Fit(history=plan.history, sensitivity=sensitivity)
    z = plan.coefficients.expand(P, -1, -1, -1)
    mask = schedule_mask([plan.compute_steps], plan.num_steps).expand(P, -1)
    return System(gram, nominal, fit).simulate(mask, torch.arange(P), z).errors


def measured_scales(
    denoise: Denoise,
    sample: Tensor,
    *,
    sigmas: Tensor,
    compute_steps: Sequence[int],
    reuse: Reuse = "residual",
    solver: SolverFactory = Euler,
) -> Tensor:
    """Phi of a given compute schedule, by the threshold search that is forced to take it."""
    norms = torch.full((len(sigmas) - 1,), torch.inf, dtype=torch.float64)
    norms[list(compute_steps)] = 0  # the ratio of eq. 12 is then 0 or infinite
    search = ThresholdSearch(1.0, norms=norms, reuse=reuse)
    run(denoise, sample, search, sigmas=sigmas, solver=solver)
    assert search.compute_steps == tuple(compute_steps)
    return search.step_scales


def rectified_plan(denoise: Denoise, sample: Tensor, plan: PaperPlan) -> PaperPlan:
    """The plan with scalar gain and bias, fitted on the noise ``sample``."""
    stepper = GainFit(plan)
    run(denoise, sample, stepper, sigmas=plan.sigmas)
    return stepper.plan()
