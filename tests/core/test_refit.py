from __future__ import annotations

import pytest
import torch

from ertacache.core.flows import rmse, shifted_sigmas
from ertacache.core.frontier import solve_frontier
from ertacache.core.gram import profile_run
from ertacache.core.refit import fit_step, refit_plan
from ertacache.core.sampler import plain_plan
from ertacache.core.search import spread_schedule
from ertacache.core.solve import Fit, fit_plans
from ertacache.core.solver import run_reference
from tests.core.conftest import Bench, bench
from tests.core.test_solve import NOMINAL, SIGMAS, STEPS, blind, noise


def closed_loop_error(flow: Bench, schedule: tuple[int, ...]) -> float:
    plan = refit_plan(
        flow.flow.velocity,
        flow.reference.latents,
        sigmas=flow.sigmas,
        compute_steps=schedule,
        nominal=flow.nominal,
        fit=Fit(),
    )
    return flow.error(plan)


@pytest.mark.parametrize(
    ("radius", "width", "factor"), [(2.0, 0.3, 10.0), (4.0, 0.1, 4.0)], ids=["mild", "stiff"]
)
@pytest.mark.parametrize("num_steps", [30, 50])
def test_a_third_of_the_steps_is_many_times_closer_than_the_alternatives(
    radius: float, width: float, factor: float, num_steps: int
) -> None:
    flow = bench(radius, width, num_steps)
    budget = num_steps // 3
    uniform = spread_schedule(num_steps, budget, {0})
    fewer = run_reference(
        flow.flow.velocity, flow.heldout, sigmas=shifted_sigmas(budget, 1.0)
    ).latents[-1]
    bar = min(flow.error(plain_plan(flow.sigmas, uniform)), rmse(fewer, flow.target)) / factor
    searched = solve_frontier(flow.statistics, flow.nominal, budgets=[budget]).points[0]
    assert closed_loop_error(flow, uniform) < bar
    assert closed_loop_error(flow, searched.plan.compute_steps) < bar


def test_a_network_that_looks_at_the_time_alone_gives_the_plan_of_its_profile() -> None:
    reference = run_reference(blind, noise(3), sigmas=SIGMAS)
    fit = Fit(history=2, sensitivity=0.0)
    (open_loop,) = fit_plans(profile_run(reference), NOMINAL, schedules=[STEPS], fit=fit)
    closed = refit_plan(
        blind, reference.latents, sigmas=SIGMAS, compute_steps=STEPS, nominal=NOMINAL, fit=fit
    )
    assert torch.allclose(closed.outputs, open_loop.outputs, atol=1e-6)
    assert torch.equal(closed.latent, open_loop.latent)


def test_one_network_call_per_computed_step(mild: Bench) -> None:
    calls = []

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        calls.append(float(sigma))
        return mild.flow.velocity(x, sigma)

    refit_plan(
        denoise,
        mild.reference.latents,
        sigmas=mild.sigmas,
        compute_steps=(0, 5, 11),
        nominal=mild.nominal,
        fit=Fit(),
    )
    assert calls == [float(mild.sigmas[k]) for k in (0, 5, 11)]


def test_a_free_latent_is_fitted() -> None:
    x, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    nominal = torch.tensor([1.0, -1.0], dtype=torch.float64)
    z = fit_step(
        x,
        [v],
        torch.tensor([[0.5, -2.0]]),
        nominal=nominal,
        fit=Fit(ridge=0.0, free_latent=True),
    )
    assert z.tolist() == pytest.approx([0.5, -2.0])
