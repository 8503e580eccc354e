from __future__ import annotations

import copy

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from ertacache.core.flows import rmse, shifted_sigmas
from ertacache.core.frontier import solve_frontier
from ertacache.core.gram import fit_nominal, profile_run
from ertacache.core.plan import PaperPlan, TrajectoryPlan
from ertacache.core.rectify import calibrate_rectification
from ertacache.core.refit import refit_plan
from ertacache.core.sampler import combine, plain_plan, run_paper, run_trajectory
from ertacache.core.search import spread_schedule
from ertacache.core.solve import Fit
from ertacache.core.solver import AdamsBashforth, LinearSolver, Solver, SolverFactory, run_reference
from tests.core.conftest import Bench

STEPS = (0, 4, 9, 14, 20, 29)


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


def ddim(sigmas: Tensor) -> Solver:
    """A first-order solver that scales the latent, as DDIM does."""
    alpha, sigma = torch.cos(sigmas * torch.pi / 2), torch.sin(sigmas * torch.pi / 2)
    c = alpha[1:] * alpha[:-1] + sigma[1:] * sigma[:-1]
    b = sigma[1:] * alpha[:-1] - alpha[1:] * sigma[:-1]
    return LinearSolver(c, b[:, None])


def test_combination_by_hand() -> None:
    x, v = torch.tensor([2.0]), [torch.tensor([10.0]), torch.tensor([100.0])]
    assert combine(x, v, [0.5, 0.1, -0.01]).item() == pytest.approx(1.0)
    assert combine(x, v[:1], [0.5, 0.1, -0.01]).item() == pytest.approx(2.0)


def test_half_precision_stays_half_precision() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert combine(x, [x], [1.0, -0.5]).dtype == torch.bfloat16


def test_plain_reuse_is_both_methods_simplest_case(mild: Bench) -> None:
    paper = PaperPlan(STEPS, "velocity", mild.sigmas)
    one = run_paper(mild.flow.velocity, mild.heldout, plan=paper)
    other = run_trajectory(
        mild.flow.velocity, mild.heldout, sigmas=mild.sigmas, plan=plain_plan(mild.sigmas, STEPS)
    )
    assert rmse(one.latents[-1], other.latents[-1]) < 1e-12
    assert rmse(one.latents[-1], mild.target) > 1e-3


@pytest.mark.parametrize("solver", [ddim, AdamsBashforth, UniPC])
def test_the_papers_plan_with_all_steps_computed_is_the_reference(
    mild: Bench, solver: SolverFactory
) -> None:
    sigmas = shifted_sigmas(30)
    reference = run_reference(mild.flow.velocity, mild.heldout, sigmas=sigmas, solver=solver)
    plan = PaperPlan(tuple(range(30)), "residual", sigmas)
    run = run_paper(mild.flow.velocity, mild.heldout, plan=plan, solver=solver)
    assert torch.equal(run.latents[-1], reference.latents[-1])


def test_reused_steps_are_rectified(mild: Bench) -> None:
    noise = mild.reference.latents[0]
    gain, bias = calibrate_rectification(
        mild.flow.velocity, noise, sigmas=mild.sigmas, compute_steps=STEPS, reuse="residual"
    )
    errors = []
    for extra in ({}, {"gain": gain, "bias": bias}):
        plan = PaperPlan(STEPS, "residual", mild.sigmas, **extra)
        run = run_paper(mild.flow.velocity, mild.heldout, plan=plan)
        errors.append(rmse(run.latents[-1], mild.target))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("solver", [ddim, AdamsBashforth, UniPC])
def test_the_target_is_whatever_the_scheduler_does(mild: Bench, solver: SolverFactory) -> None:
    """A third of the steps, in the user's own solver: plain reuse, from the profile, refitted."""
    sigmas, velocity = shifted_sigmas(30), mild.flow.velocity
    noise = mild.reference.latents[0]
    reference = run_reference(velocity, noise, sigmas=sigmas, solver=solver)
    target = run_reference(velocity, mild.heldout, sigmas=sigmas, solver=solver).latents[-1]
    statistics = profile_run(reference)
    nominal = fit_nominal(statistics, latent=None if solver is ddim else 1.0)
    point = solve_frontier(statistics, nominal, budgets=[10]).points[0]
    steps = point.plan.compute_steps
    refitted = refit_plan(
        velocity,
        reference.latents,
        sigmas=sigmas,
        compute_steps=steps,
        nominal=nominal,
        fit=Fit(),
    )
    plain = PaperPlan(spread_schedule(30, 10, {0}), "velocity", sigmas)
    plain_error = rmse(
        run_paper(velocity, mild.heldout, plan=plain, solver=solver).latents[-1], target
    )
    for plan, factor in ((point.plan, 2.0), (refitted, 4.0)):
        run = run_trajectory(velocity, mild.heldout, sigmas=sigmas, plan=plan)
        assert rmse(run.latents[-1], target) < plain_error / factor


def test_the_network_runs_on_computed_steps_only(mild: Bench) -> None:
    calls: list[float] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        calls.append(float(sigma))
        return mild.flow.velocity(x, sigma)

    expected = [float(mild.sigmas[k]) for k in STEPS]
    run_paper(denoise, mild.heldout, plan=PaperPlan(STEPS, "residual", mild.sigmas))
    assert calls == expected
    calls.clear()
    run_trajectory(denoise, mild.heldout, sigmas=mild.sigmas, plan=plain_plan(mild.sigmas, STEPS))
    assert calls == expected


def test_a_plan_of_other_steps_is_refused(mild: Bench) -> None:
    with pytest.raises(ValueError, match="a plan of 30 steps, but a table of 20"):
        run_trajectory(
            mild.flow.velocity,
            mild.heldout,
            sigmas=shifted_sigmas(20),
            plan=plain_plan(mild.sigmas, STEPS),
        )


def test_plans_that_cannot_be_run_are_refused() -> None:
    sigmas = shifted_sigmas(4)
    coefficients = torch.ones(4).double(), torch.ones(4, 2).double()
    assert TrajectoryPlan((0, 2), *coefficients).history == 2
    for steps, sentence in (
        ((1, 2), "step 0 must be computed"),
        ((0, 2, 2), "strictly increasing"),
        ((0, 4), "holds 4, but the run has 4 steps"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TrajectoryPlan(steps, *coefficients)
    with pytest.raises(ValueError, match="computes the last step"):
        PaperPlan((0, 2), "residual", sigmas)
    with pytest.raises(ValueError, match="must not increase"):
        PaperPlan((0, 3), "residual", sigmas.flip(0))
    with pytest.raises(ValueError, match="come together"):
        PaperPlan((0, 3), "residual", sigmas, gain=torch.zeros(4).double())
    broken = copy.deepcopy(coefficients[1])
    broken[1, 1] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        TrajectoryPlan((0, 2), coefficients[0], broken)
