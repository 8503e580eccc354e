from __future__ import annotations

import math

import torch
from torch import Tensor

from ertacache.core.flows import shifted_sigmas
from ertacache.core.solver import AdamsBashforth, Euler, SolverFactory, run_reference


def final_error(solver: SolverFactory, steps: int) -> float:
    """Of dx/dsigma = x from sigma 1 to 0, whose answer is x_0 / e."""
    run = run_reference(
        lambda x, sigma: x,
        torch.ones(1, 1, dtype=torch.float64),
        sigmas=shifted_sigmas(steps, 3.0),
        solver=solver,
    )
    return abs(run.latents[-1].item() - math.exp(-1))


def test_euler_is_of_first_order_and_adams_bashforth_of_second() -> None:
    assert 1.8 < final_error(Euler, 50) / final_error(Euler, 100) < 2.2
    assert 3.5 < final_error(AdamsBashforth, 50) / final_error(AdamsBashforth, 100) < 4.5


def test_outputs_that_do_not_change_are_integrated_exactly() -> None:
    table = shifted_sigmas(7)
    for solver in (Euler, AdamsBashforth):
        run = run_reference(
            lambda x, sigma: torch.full_like(x, 2.0), torch.ones(3, 4), sigmas=table, solver=solver
        )
        assert torch.allclose(run.latents[-1], torch.full((3, 4), -1.0), atol=1e-6)


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
