"""Algorithm 2 with and without the network, uniform schedules, selection by budget."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.plan import Reuse
from ertacache.core.residual import relative_l1, residual
from ertacache.core.solver import AdamsBashforth, Euler, SolverFactory, Trajectory, run_reference
from ertacache.core.threshold import (
    pick_schedule,
    search_profile,
    search_thresholds,
    sweep_profile,
    uniform_schedule,
)

RING = GaussianRing(2.0, 0.3)
TABLE = shifted_sigmas(20)
NOISE = RING.noise(8, seed=0)
THRESHOLDS = [i / 50 for i in range(60)]


class Counted:
    """The ring's velocity, counting its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.calls += 1
        return RING.velocity(x, sigma)


def search_one(
    reference: Trajectory, sigmas: Tensor, lam: float, reuse: Reuse, solver: SolverFactory
) -> tuple[int, ...]:
    """Algorithm 2 as printed, one threshold, one network call per step."""
    run, x, T = solver(sigmas), reference.latents[0], reference.num_steps
    steps: list[int] = []
    r_tilde = torch.empty(0)
    for k in range(T):
        v = RING.velocity(x, sigmas[k])
        r = residual(v, x) if reuse == "residual" else v
        r_gt = reference.outputs[k]
        r_gt = residual(r_gt, reference.latents[k]) if reuse == "residual" else r_gt
        if k not in (0, T - 1) and relative_l1(r_tilde, r, reference=r_gt) < lam:
            used = x + r_tilde if reuse == "residual" else r_tilde
        else:
            steps.append(k)
            r_tilde, used = r, v
        x = run.step(used, k, x)
    return tuple(steps)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
@pytest.mark.parametrize("solver", [Euler, AdamsBashforth])
def test_search_equals_one_threshold_at_a_time(reuse: Reuse, solver: SolverFactory) -> None:
    reference = run_reference(RING.velocity, NOISE, sigmas=TABLE, solver=solver)
    found = search_thresholds(
        RING.velocity, reference, sigmas=TABLE, thresholds=THRESHOLDS, reuse=reuse, solver=solver
    )
    assert list(found) == THRESHOLDS
    for lam, steps in found.items():
        assert steps == search_one(reference, TABLE, lam, reuse, solver)
    assert len(set(found.values())) > 10
    assert all(steps[0] == 0 and steps[-1] == 19 for steps in found.values())


def test_search_calls_the_network_once_per_node_of_the_decision_tree() -> None:
    reference, network = run_reference(RING.velocity, NOISE, sigmas=TABLE), Counted()
    found = search_thresholds(network, reference, sigmas=TABLE, thresholds=THRESHOLDS)
    # A node: the decisions before step k, if any of them was to reuse (else the reference knows).
    nodes = {
        (k, tuple(c for c in steps if c < k))
        for steps in found.values()
        for k in range(1, 19)
        if sum(c < k for c in steps) < k
    }
    assert network.calls == len(nodes)
    assert network.calls < 20 * len(THRESHOLDS) / 3


def test_search_reuses_strictly_below_the_threshold() -> None:
    table = torch.linspace(1, 0, 5, dtype=torch.float64)

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.full_like(x, 2.0 if sigma == 1 else 1.0)

    reference = run_reference(field, NOISE, sigmas=table)
    above = math.nextafter(1.0, 2.0)
    found = search_thresholds(  # |2 - 1| / |1| is exactly 1
        field, reference, sigmas=table, thresholds=[1.0, above], reuse="velocity"
    )
    assert found == {1.0: (0, 1, 3), above: (0, 3)}


def test_search_without_reuse_needs_no_network() -> None:
    reference, network = run_reference(RING.velocity, NOISE, sigmas=TABLE), Counted()
    found = search_thresholds(network, reference, sigmas=TABLE, thresholds=[0.0])
    assert found == {0.0: tuple(range(20))}
    assert network.calls == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_search_of_a_run_too_short_to_reuse(steps: int) -> None:
    table = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    reference = run_reference(RING.velocity, NOISE, sigmas=table)
    found = search_thresholds(RING.velocity, reference, sigmas=table, thresholds=[9.0])
    assert found == {9.0: tuple(range(steps))}
    assert search_profile(torch.zeros(1, steps, steps), torch.ones(1, steps), threshold=9.0) == (
        tuple(range(steps))
    )


def test_search_refuses_what_cannot_be_searched() -> None:
    reference = run_reference(RING.velocity, NOISE, sigmas=TABLE)
    with pytest.raises(ValueError, match="at least one"):
        search_thresholds(RING.velocity, reference, sigmas=TABLE, thresholds=[])
    with pytest.raises(ValueError, match="numbers"):
        search_thresholds(RING.velocity, reference, sigmas=TABLE, thresholds=[math.nan])
    with pytest.raises(ValueError, match="the reference 20"):
        search_thresholds(RING.velocity, reference, sigmas=TABLE[1:], thresholds=[0.1])


def profile(trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """L1 distances and norms of the reference residuals, per prompt."""
    r = torch.stack(
        [residual(v, x) for v, x in zip(trajectory.outputs, trajectory.latents, strict=False)], 1
    )
    return (r[:, :, None] - r[:, None]).abs().sum(-1), r.abs().sum(-1)


def test_profile_search_is_the_network_search_on_an_unmoved_trajectory() -> None:
    """With outputs that do not depend on the latent, only the residual's own x differs."""
    v = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    table = torch.linspace(1, 0, 13, dtype=torch.float64)

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return v[round((1 - sigma.item()) * 12)].cumsum(0)

    reference = run_reference(field, NOISE.new_zeros(5, 3), sigmas=table)
    outputs = torch.stack(reference.outputs, 1)
    l1, norm = (outputs[:, :, None] - outputs[:, None]).abs().sum(-1), outputs.abs().sum(-1)
    found = search_thresholds(
        field, reference, sigmas=table, thresholds=THRESHOLDS, reuse="velocity"
    )
    for lam, steps in found.items():
        assert search_profile(l1, norm, threshold=lam) == steps


def test_profile_search_sums_over_prompts_before_it_divides() -> None:
    l1, norm = torch.zeros(2, 3, 3), torch.ones(2, 3)
    l1[0, 0, 1], norm[1, 1] = 1.0, 9.0  # 1 / (1 + 9) = 0.1
    assert search_profile(l1, norm, threshold=0.11) == (0, 2)
    assert search_profile(l1, norm, threshold=0.1) == (0, 1, 2)


def test_sweep_holds_every_schedule() -> None:
    l1, norm = profile(run_reference(RING.velocity, NOISE, sigmas=TABLE))
    sweep = sweep_profile(l1, norm)
    distances = (l1.sum(0) / norm.sum(0)).flatten().unique().tolist()
    for lam in [*distances, *(math.nextafter(d, math.inf) for d in distances), 1e9]:
        below = max(key for key in sweep if key <= lam)
        assert sweep[below] == search_profile(l1, norm, threshold=lam)
    assert sweep[0.0] == tuple(range(20))
    assert list(sweep.values())[-1] == (0, 19)


@pytest.mark.parametrize("budget", range(2, 21))
def test_pick_schedule_stays_within_the_budget(budget: int) -> None:
    sweep = sweep_profile(*profile(run_reference(RING.velocity, NOISE, sigmas=TABLE)))
    lam, steps = pick_schedule(sweep, budget)
    assert sweep[lam] == steps
    assert len(steps) == max(len(s) for s in sweep.values() if len(s) <= budget)
    assert lam == min(key for key, s in sweep.items() if len(s) == len(steps))


def test_pick_schedule_says_when_there_is_none() -> None:
    with pytest.raises(ValueError, match="larger thresholds"):
        pick_schedule({0.1: (0, 1, 2)}, 2)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 200).flatmap(lambda T: st.tuples(st.just(T), st.integers(2, T))))
def test_uniform_schedule_is_even(size: tuple[int, int]) -> None:
    num_steps, budget = size
    steps = uniform_schedule(num_steps, budget)
    gaps = [b - a for a, b in pairwise(steps)]
    assert len(steps) == budget
    assert (steps[0], steps[-1]) == (0, num_steps - 1)
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("budget", [0, 11])
def test_uniform_schedule_refuses_a_budget_outside_the_run(budget: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 10"):
        uniform_schedule(10, budget)
