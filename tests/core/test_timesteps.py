"""Phi and the adjusted sigma table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.plan import PaperPlan
from ertacache.core.residual import residual
from ertacache.core.solver import run_reference
from ertacache.core.threshold import uniform_schedule
from ertacache.core.timesteps import (
    adjusted_sigmas,
    calibrate_step_scales,
    profile_step_scales,
    step_scale,
)

RING = GaussianRing(2.0, 0.3)
NOISE = RING.noise(32, seed=0)


def test_step_scale_by_hand_and_clipped() -> None:
    v, before = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0])
    assert step_scale(torch.tensor([1.5, 0.5]), v, previous=before) == 0.75
    assert step_scale(v, v, previous=before) == 1.0
    assert step_scale(torch.tensor([9.0, 9.0]), v, previous=before) == 0.0


def test_step_scale_where_the_output_stands_still() -> None:
    v = torch.ones(3)
    assert step_scale(v, v, previous=v) == 1.0
    assert step_scale(2 * v, v, previous=v) == 0.0


def test_adjusted_table_by_hand() -> None:
    """Half a step, then what remains of the way in proportion to the nominal 1/2 and 1/4."""
    table = torch.tensor([2.0, 1.0, 0.75, 0.25, 0.0])
    phi = torch.tensor([1.0, 0.5, 1.0, 1.0])
    # after step 1: 1 - 0.125 = 0.875, of which step 2 takes 0.5 / 0.75
    expected = torch.tensor([2.0, 1.0, 0.875, 0.875 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(adjusted_sigmas(table, phi), expected, rtol=0, atol=1e-15)


descending = st.lists(
    st.floats(1e-3, 1e3), min_size=2, max_size=40, unique=True
).map(lambda s: torch.tensor(sorted(s, reverse=True), dtype=torch.float64))  # fmt: skip
tables = descending.flatmap(
    lambda s: st.tuples(
        st.just(s),
        st.lists(
            st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=len(s) - 2, max_size=len(s) - 2
        ),
    )
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tables)
def test_adjusted_table_is_monotone_and_keeps_its_ends(case: tuple[torch.Tensor, list]) -> None:
    table, scales = case
    adjusted = adjusted_sigmas(table, torch.tensor([*scales, 1.0]))
    assert adjusted[0] == table[0]
    assert adjusted[-1] == table[-1]
    assert bool((adjusted.diff() <= 0).all())
    assert bool((adjusted >= table - 1e-9).all())  # a shrunk step only ever leaves more to do
    for k, phi in enumerate(scales):
        assert phi > 0 or adjusted[k + 1] == adjusted[k]
    PaperPlan(tuple(range(len(table) - 1)), "residual", adjusted)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(descending)
def test_unscaled_table_is_unchanged_to_the_bit(table: torch.Tensor) -> None:
    assert torch.equal(adjusted_sigmas(table, torch.ones(len(table) - 1)), table)


def test_adjusted_table_does_not_round_upwards() -> None:
    sigma = 0.10152422185672019
    following = math.nextafter(sigma, 0)
    assert 0.2 * following + 0.8 * sigma > sigma
    table = torch.tensor([sigma, following, 0.0], dtype=torch.float64)
    scales = torch.tensor([0.2, 1.0], dtype=torch.float64)
    assert adjusted_sigmas(table, scales).tolist() == [sigma, sigma, 0.0]


def test_adjusted_table_of_float32_is_float64() -> None:
    table = shifted_sigmas(30).float()
    adjusted = adjusted_sigmas(table, torch.ones(30))
    assert adjusted.dtype == torch.float64
    assert torch.equal(adjusted.float(), table)


@pytest.mark.parametrize(
    ("table", "scales", "message"),
    [
        ([1.0, 0.5, 0.0], [1.0], "as many step_scales"),
        ([1.0, 1.0, 0.0], [1.0, 1.0], "strictly descending"),
        ([1.0, 0.5, 0.0], [1.5, 1.0], "between 0 and 1"),
        ([1.0, 0.5, 0.0], [float("nan"), 1.0], "between 0 and 1"),
        ([1.0, 0.5, 0.0], [1.0, 0.5], "last step"),
    ],
)
def test_adjusted_table_refuses(table: list[float], scales: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adjusted_sigmas(torch.tensor(table), torch.tensor(scales))


def test_calibrated_scales_are_1_on_computed_steps_only() -> None:
    steps = uniform_schedule(30, 10)
    phi = calibrate_step_scales(
        RING.velocity, NOISE, sigmas=shifted_sigmas(30), compute_steps=steps
    )
    assert phi.dtype == torch.float64
    assert all((phi[k] == 1) == (k in steps) for k in range(30))
    assert bool(((phi >= 0) & (phi <= 1)).all())


def test_profile_scales_are_the_calibrated_ones_for_single_reuse() -> None:
    """With one reused step after an untouched start, both see the same two outputs."""
    sigmas, steps = shifted_sigmas(6), (0, 1, 3, 4, 5)
    run = run_reference(RING.velocity, NOISE, sigmas=sigmas)
    v = torch.stack(run.outputs, 1)
    r = residual(v, torch.stack(run.latents[:-1], 1))
    residual_l1, output_l1 = ((a[:, :, None] - a[:, None]).abs().sum(-1) for a in (r, v))
    phi = profile_step_scales(residual_l1, output_l1, compute_steps=steps)
    measured = calibrate_step_scales(RING.velocity, NOISE, sigmas=sigmas, compute_steps=steps)
    torch.testing.assert_close(phi, measured, rtol=0, atol=1e-12)
    assert 0 < phi[2] < 1


def test_profile_scales_of_velocity_reuse_are_zero() -> None:
    run = run_reference(RING.velocity, NOISE, sigmas=shifted_sigmas(9))
    v = torch.stack(run.outputs, 1)
    l1 = (v[:, :, None] - v[:, None]).abs().sum(-1)
    phi = profile_step_scales(l1, l1, compute_steps=(0, 2, 4, 6, 8))
    assert phi.tolist() == [1.0, 0.0] * 4 + [1.0]
