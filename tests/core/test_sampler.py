"""The full run and the runs of steppers, with solvers of first order and of higher order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import rmse, shifted_sigmas
from ertacache.core.frontier import solve_frontier
from ertacache.core.gram import profile_run
from ertacache.core.paper_steppers import PaperStepper
from ertacache.core.plans import PaperPlan
from ertacache.core.sampler import Euler, SolverFactory, run, run_reference
from ertacache.core.search import spread_schedule
from ertacache.core.steppers import TrajectoryStepper
from tests.core.rings import Bench, plain_plan, rectified_plan, refitted
from tests.core.solvers import AdamsBashforth, UniPC, ddim, ddim_update, euler_update

STEPS = (0, 4, 9, 14, 20, 29)


def final_error(solver: SolverFactory, steps: int) -> float:
    """Of dx/dsigma = x from sigma 1 to 0, whose solution is x_0 / e."""
    full = run_reference(
        lambda x, sigma: x,
        torch.ones(1, 1, dtype=torch.float64),
        sigmas=shifted_sigmas(steps, 3.0),
        solver=solver,
    )
    return abs(full.latents[-1].item() - math.exp(-1))


def test_euler_is_of_first_order_and_adams_bashforth_of_second() -> None:
    assert 1.8 < final_error(Euler, 50) / final_error(Euler, 100) < 2.2
    assert 3.5 < final_error(AdamsBashforth, 50) / final_error(AdamsBashforth, 100) < 4.5


def test_outputs_that_do_not_change_are_integrated_exactly() -> None:
    sigmas = shifted_sigmas(7)
    for solver in (Euler, AdamsBashforth):
        full = run_reference(
            lambda x, sigma: torch.full_like(x, 2.0), torch.ones(3, 4), sigmas=sigmas, solver=solver
        )
        assert torch.allclose(full.latents[-1], torch.full((3, 4), -1.0), atol=1e-6)


def test_a_fresh_solver_for_every_run() -> None:
    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        return x * sigma

    noise = torch.ones(1, 2, dtype=torch.float64)
    first, second = (
        run_reference(denoise, noise, sigmas=shifted_sigmas(5), solver=AdamsBashforth)
        for _ in range(2)
    )
    assert torch.equal(first.latents[-1], second.latents[-1])
    assert first.num_steps == 5
    assert len(first.latents) == 6


def test_plain_reuse_is_both_methods_simplest_case(mild: Bench) -> None:
    paper = PaperStepper(PaperPlan(STEPS, "velocity", mild.sigmas))
    trajectory = TrajectoryStepper(plain_plan(mild.sigmas, STEPS))
    one, other = (
        run(mild.flow.velocity, mild.heldout, stepper, sigmas=mild.sigmas)
        for stepper in (paper, trajectory)
    )
    assert len(one) == len(other) == 31
    assert rmse(one[-1], other[-1]) < 1e-12
    assert rmse(one[-1], mild.target) > 1e-3


@pytest.mark.parametrize("solver", [ddim, AdamsBashforth, UniPC])
def test_the_papers_plan_with_all_steps_computed_is_the_reference(
    mild: Bench, solver: SolverFactory
) -> None:
    sigmas = shifted_sigmas(30)
    reference = run_reference(mild.flow.velocity, mild.heldout, sigmas=sigmas, solver=solver)
    stepper = PaperStepper(PaperPlan(tuple(range(30)), "residual", sigmas))
    latents = run(mild.flow.velocity, mild.heldout, stepper, sigmas=sigmas, solver=solver)
    assert torch.equal(latents[-1], reference.latents[-1])


def test_reused_steps_are_rectified(mild: Bench) -> None:
    plain = PaperPlan(STEPS, "residual", mild.sigmas)
    fitted = rectified_plan(mild.flow.velocity, mild.reference.latents[0], plain)
    errors = []
    for plan in (plain, fitted):
        latents = run(mild.flow.velocity, mild.heldout, PaperStepper(plan), sigmas=mild.sigmas)
        errors.append(rmse(latents[-1], mild.target))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("solver", [ddim, AdamsBashforth, UniPC])
def test_the_target_is_whatever_the_scheduler_does(mild: Bench, solver: SolverFactory) -> None:
    """A third of the steps, in the user's own solver: plain reuse, from the profile, refitted."""
    sigmas, velocity = shifted_sigmas(30), mild.flow.velocity
    noise = mild.reference.latents[0]
    reference = run_reference(velocity, noise, sigmas=sigmas, solver=solver)
    target = run_reference(velocity, mild.heldout, sigmas=sigmas, solver=solver).latents[-1]
    nominal = ddim_update(sigmas) if solver is ddim else euler_update(sigmas)
    point = solve_frontier(profile_run(reference).gram, nominal, budgets=[10]).points[0]
    refit = refitted(
        velocity,
        reference.latents,
        sigmas=sigmas,
        compute_steps=point.plan.compute_steps,
        nominal=nominal,
    )
    plain = PaperStepper(PaperPlan(spread_schedule(30, 10, {0}), "velocity", sigmas))
    latents = run(velocity, mild.heldout, plain, sigmas=sigmas, solver=solver)
    plain_error = rmse(latents[-1], target)
    for plan, factor in ((point.plan, 2.0), (refit, 4.0)):
        latents = run(velocity, mild.heldout, TrajectoryStepper(plan), sigmas=sigmas)
        assert rmse(latents[-1], target) < plain_error / factor


def test_the_network_runs_on_computed_steps_only(mild: Bench) -> None:
    calls: list[float] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        calls.append(float(sigma))
        return mild.flow.velocity(x, sigma)

    for stepper in (
        PaperStepper(PaperPlan(STEPS, "residual", mild.sigmas)),
        TrajectoryStepper(plain_plan(mild.sigmas, STEPS)),
    ):
        calls.clear()
        run(denoise, mild.heldout, stepper, sigmas=mild.sigmas)
        assert calls == [float(mild.sigmas[k]) for k in STEPS]


def test_a_run_takes_the_sigma_schedule_of_the_stepper() -> None:
    nominal = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    adjusted = torch.tensor([1.0, 0.75, 0.5, 0.0], dtype=torch.float64)
    seen: list[float] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append(sigma.item())
        return torch.ones_like(x)

    stepper = PaperStepper(PaperPlan((0, 2), "velocity", adjusted))
    latents = run(denoise, torch.zeros(1, dtype=torch.float64), stepper, sigmas=nominal)
    assert seen == [1.0, 0.5]
    assert [x.item() for x in latents] == [0.0, -0.25, -0.5, -1.0]


@pytest.mark.parametrize("num_steps", [20, 40])
def test_a_plan_of_other_steps_is_refused(mild: Bench, num_steps: int) -> None:
    for stepper in (
        TrajectoryStepper(plain_plan(mild.sigmas, STEPS)),
        PaperStepper(PaperPlan(STEPS, "velocity", mild.sigmas)),
    ):
        with pytest.raises(ValueError, match=f"30 steps, but a sigma schedule of {num_steps}"):
            run(mild.flow.velocity, mild.heldout, stepper, sigmas=shifted_sigmas(num_steps))
