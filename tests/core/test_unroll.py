from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import shifted_sigmas
from ertacache.core.sampler import Euler, run_reference
from ertacache.core.unroll import LinearSolver, integrate_with, read_loop
from ertacache.integration.sample import integrate_sampler
from tests.core import samplers
from tests.core.solvers import AdamsBashforth, schedule_of

SIGMAS = shifted_sigmas(8)


def network(x: Tensor, sigma: Tensor) -> Tensor:
    return torch.sin(3 * x + sigma)


@pytest.mark.parametrize("solver", [Euler, AdamsBashforth])
def test_a_solver_is_read_as_by_hand(solver: Any) -> None:
    found = read_loop(integrate_with(solver), SIGMAS, flow=True).schedule
    assert found.same_run(schedule_of(SIGMAS, solver=solver))
    torch.testing.assert_close(found.latents, schedule_of(SIGMAS, solver=solver).latents)
    assert found.begun
    assert bool((found.scale == 1).all())


@pytest.mark.parametrize("sampler", [samplers.euler, samplers.dpmpp_2m, samplers.dpm_2])
@pytest.mark.parametrize("flow", [True, False])
def test_a_sampler_function_is_reproduced_from_its_coefficients(sampler: Any, flow: bool) -> None:
    sigmas = SIGMAS if flow else samplers.karras(8)
    integrate = integrate_sampler(sampler)
    run = read_loop(integrate, sigmas, flow=flow)
    noise = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = integrate(network, noise, sigmas)
    ours = run_reference(
        network, noise, sigmas=run.sigmas, solver=lambda _: LinearSolver(run)
    ).latents[-1]
    torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-9)


def test_two_evaluations_per_interval_are_two_steps() -> None:
    run = read_loop(integrate_sampler(samplers.dpm_2), SIGMAS, flow=True)
    assert run.num_steps == 15  # the last interval ends at 0 and has one
    torch.testing.assert_close(run.sigmas[0:16:2][:8], SIGMAS[:8])
    assert run.sigmas[1].item() == pytest.approx((SIGMAS[0] * SIGMAS[1]).sqrt().item())


def test_a_sampler_that_ends_above_zero_and_has_constants_of_its_own_type() -> None:
    def sampler(model: Any, x: Tensor, sigmas: Tensor, **options: Any) -> Tensor:
        if sigmas[-1] == 0:
            sigmas[-1] = 0.001  # as ComfyUI's uni_pc does
        for now, then in pairwise(sigmas):
            d = (x - model(x, now * x.new_ones(len(x)))) / now
            x = x + (then - now) * torch.tensordot(d[..., None], torch.ones(1), dims=1)
        return x

    sigmas = SIGMAS.clone()
    run = read_loop(integrate_sampler(sampler), sigmas, flow=True)
    assert torch.equal(sigmas, SIGMAS)
    assert run.sigmas[-1].item() == pytest.approx(0.001)
    expected = schedule_of(run.sigmas, solver=Euler).latents
    torch.testing.assert_close(run.schedule.latents, expected, rtol=0, atol=1e-6)


def test_sigmas_of_unscaled_data_become_shares_of_noise() -> None:
    run = read_loop(integrate_sampler(samplers.euler), samplers.karras(6), flow=False)
    assert run.sigmas[0].item() == pytest.approx(14.6)
    assert run.schedule.sigmas[0].item() == pytest.approx(14.6 / 15.6)
    assert run.schedule.scale[0].item() == pytest.approx((1 + 14.6**2) ** 0.5)
    assert run.schedule.scale[-1].item() == 1


def test_a_run_that_begins_with_little_noise_is_not_begun() -> None:
    late = read_loop(integrate_with(Euler), torch.tensor([0.6, 0.3, 0.0]), flow=True)
    assert not late.schedule.begun
    told = read_loop(integrate_with(Euler), torch.tensor([0.6, 0.3, 0.0]), flow=True, begun=True)
    assert told.schedule.begun


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (samplers.ancestral, "adds noise on its way: use a deterministic one"),
        (samplers.clipping, "not linear in the outputs"),
        (samplers.heun, "twice at one noise level"),
        (samplers.endless, "more than 4 times per step"),
    ],
)
def test_what_cannot_be_followed_is_refused(sampler: Any, message: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        read_loop(integrate_sampler(sampler), SIGMAS, flow=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([1.0, 0.5, 0.5, 0.0], "must descend"),
        ([1.0, float("nan"), 0.0], "must descend at every step, and be finite"),
        ([14.6, 1.0, 0.0], "from at most 1 to 0, as those of a flow, got 14.6 to 0"),
        ([1.0], "at least two numbers"),
        ([[1.0, 0.0]], "one row"),
    ],
)
def test_sigmas_that_are_none_are_refused(sigmas: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_loop(integrate_with(Euler), torch.tensor(sigmas), flow=True)


def test_after_steps_that_were_not_its_own_the_solver_takes_those_of_euler() -> None:
    run = read_loop(integrate_with(AdamsBashforth), SIGMAS, flow=True)
    x, v = torch.tensor([3.0]), torch.tensor([2.0])
    taken = LinearSolver(run).step(v, 4, x)
    torch.testing.assert_close(taken, Euler(SIGMAS).step(v, 4, x))
