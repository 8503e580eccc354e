"""Gain and bias in closed form from sums that merge."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.gram import profile_run
from ertacache.core.plan import PaperPlan, Reuse
from ertacache.core.rectify import (
    RectifyMode,
    RectifySums,
    calibrate_rectification,
    fit_rectification,
    profile_rectification,
    rectify,
)
from ertacache.core.solver import run_reference
from ertacache.core.threshold import uniform_schedule
from ertacache.core.timesteps import adjusted_sigmas, calibrate_step_scales

RING = GaussianRing(2.0, 0.3)
NOISE = RING.noise(64, seed=0)
MODES: list[RectifyMode] = ["scalar", "channel", "element"]


def outputs(count: int, seed: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v_tilde, noise = torch.randn(2, count, 3, 4, 5, generator=generator, dtype=torch.float64)
    return v_tilde + offset, 0.9 * v_tilde + 0.1 * noise + offset


@pytest.mark.parametrize(
    ("mode", "shape", "count"),
    [("scalar", (), 360), ("channel", (3, 1, 1), 120), ("element", (3, 4, 5), 6)],
)
def test_sums_broadcast_against_one_sample(
    mode: RectifyMode, shape: tuple[int, ...], count: int
) -> None:
    sums = RectifySums.of(*outputs(6, seed=0), mode=mode)
    assert sums.count == count
    for moment in (sums.mean_output, sums.mean_shift, sums.output_moment, sums.cross_moment):
        assert moment.shape == shape
        assert moment.dtype == torch.float64


def test_channels_may_be_the_last_dimension() -> None:
    v_tilde, v = torch.randn(2, 6, 20, 3, generator=torch.Generator().manual_seed(0))
    assert RectifySums.of(v_tilde, v, mode="channel", channel_dim=-1).mean_output.shape == (1, 3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(MODES),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([0.0, 3.0, 1e6]),
    st.integers(0, 99),
)
def test_merged_sums_are_the_sums_of_the_whole(
    mode: RectifyMode, sizes: list[int], offset: float, seed: int
) -> None:
    v_tilde, v = outputs(sum(sizes), seed=seed, offset=offset)
    whole = RectifySums.of(v_tilde, v, mode=mode)
    parts = zip(v_tilde.split(sizes), v.split(sizes), strict=True)
    merged = reduce(add, (RectifySums.of(a, b, mode=mode) for a, b in parts))
    assert merged.count == whole.count
    # At an offset of 1e6 the inputs themselves are rounded to 1e-10.
    tolerance = 1e-12 if offset < 10 else 1e-9
    for name in ("mean_output", "mean_shift", "output_moment", "cross_moment"):
        a, b = getattr(merged, name), getattr(whole, name)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=tolerance * len(v))


def test_sums_of_different_shapes_do_not_merge() -> None:
    a, b = (RectifySums.of(*outputs(2, seed=0), mode=mode) for mode in ("scalar", "channel"))
    with pytest.raises(ValueError, match="do not merge"):
        a + b


@pytest.mark.parametrize(
    ("mode", "dim", "message"), [("pixel", 1, "'element'"), ("channel", 0, "batch of prompts")]
)
def test_sums_refuse_a_bad_mode(mode: RectifyMode, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RectifySums.of(*outputs(2, seed=0), mode=mode, channel_dim=dim)


@pytest.mark.parametrize("mode", MODES)
def test_fit_is_the_least_squares_line(mode: RectifyMode) -> None:
    """The normal equations of eq. 18 and 19: the remaining error has no mean and no slope."""
    v_tilde, v = outputs(50, seed=1, offset=2.0)
    K, B = fit_rectification(RectifySums.of(v_tilde, v, mode=mode))
    left = RectifySums.of(v_tilde, v_tilde - (rectify(v_tilde, gain=K, bias=B) - v), mode=mode)
    assert left.mean_shift.abs().max() < 1e-13
    assert left.cross_moment.abs().max() < 1e-10


def test_fit_agrees_with_lstsq() -> None:
    v_tilde, v = outputs(9, seed=2)
    K, B = fit_rectification(RectifySums.of(v_tilde, v, mode="scalar"))
    design = torch.stack([v_tilde.flatten(), torch.ones(v_tilde.numel())], dim=1)
    line = torch.linalg.lstsq(design, (v_tilde - v).flatten()[:, None]).solution.flatten()
    torch.testing.assert_close(torch.stack([K / 4, B / 4 + 0.5]), line, rtol=0, atol=1e-13)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e7])
def test_outputs_that_do_not_vary_get_no_gain(value: float) -> None:
    v_tilde = torch.full((7, 2), value, dtype=torch.float64)
    v = torch.randn(7, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    K, B = fit_rectification(RectifySums.of(v_tilde, v, mode="element"))
    assert K.tolist() == [0.0, 0.0]
    rounding = 1e-15 * max(1.0, abs(value))
    torch.testing.assert_close(
        rectify(v_tilde, gain=K, bias=B)[0], v.mean(0), rtol=0, atol=rounding
    )


def test_one_prompt_per_element_has_no_gain_and_the_exact_bias() -> None:
    v_tilde, v = outputs(1, seed=4)
    K, B = fit_rectification(RectifySums.of(v_tilde, v, mode="element"))
    assert not K.any()
    torch.testing.assert_close(rectify(v_tilde, gain=K, bias=B), v, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rectify_keeps_dtype_and_small_offsets(dtype: torch.dtype) -> None:
    """An offset of 1e-4 vanishes if B = -2 + 4e-4 is rounded to half precision first."""
    v_tilde = torch.zeros(2, 3, dtype=dtype)
    gain = torch.zeros(3, dtype=torch.float64)
    bias = torch.full((3,), -2 + 4e-4, dtype=torch.float64)
    out = rectify(v_tilde, gain=gain, bias=bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.full((2, 3), -1e-4).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
@pytest.mark.parametrize(("mode", "shape"), [("scalar", ()), ("channel", (2,)), ("element", (2,))])
def test_calibration_fills_a_plan(reuse: str, mode: RectifyMode, shape: tuple[int, ...]) -> None:
    sigmas, steps = shifted_sigmas(12), uniform_schedule(12, 5)
    kwargs = {"sigmas": sigmas, "compute_steps": steps, "reuse": reuse}
    phi = calibrate_step_scales(RING.velocity, NOISE, **kwargs)
    table = adjusted_sigmas(sigmas, phi)
    gain, bias = calibrate_rectification(
        RING.velocity, NOISE, **{**kwargs, "sigmas": table}, mode=mode
    )
    plan = PaperPlan(steps, reuse, table, gain, bias)
    assert gain.shape == bias.shape == (12, *shape)
    v = RING.velocity(NOISE, 1.0)
    for k in range(12):
        kept = torch.equal(rectify(v, gain=plan.gain[k], bias=plan.bias[k]), v)
        assert kept == (k in steps)


def test_each_step_is_fitted_behind_the_rectified_ones() -> None:
    """The fit of the second reused step in a row is that of a walk with the first one rectified."""
    sigmas = shifted_sigmas(4)
    gain, bias = calibrate_rectification(
        RING.velocity, NOISE, sigmas=sigmas, compute_steps=(0, 3), reuse="velocity"
    )
    d, v = sigmas.diff(), RING.velocity(NOISE, sigmas[0])
    x = NOISE + d[0] * v
    x = x + d[1] * rectify(v, gain=gain[1], bias=bias[1])
    sums = RectifySums.of(v, RING.velocity(x, sigmas[2]), mode="scalar")
    torch.testing.assert_close(
        torch.stack([gain[2], bias[2]]), torch.stack(fit_rectification(sums)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_from_the_profile_alone_where_the_network_looks_at_the_time_alone(reuse: Reuse) -> None:
    """Then outputs at accelerated latents are the reference ones, and both ways must agree."""
    slopes = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)

    def blind(x: Tensor, sigma: Tensor) -> Tensor:
        return (torch.cos(4 * sigma * slopes) + slopes).expand_as(x)

    noise = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigmas, steps = shifted_sigmas(8), (0, 2, 3, 7)
    statistics = profile_run(run_reference(blind, noise, sigmas=sigmas))
    gain, bias = profile_rectification(statistics, compute_steps=steps, reuse=reuse)
    for k in set(range(8)) - set(steps):
        j = max(step for step in steps if step < k)
        reference = run_reference(blind, noise, sigmas=sigmas)
        x, v = reference.latents, reference.outputs
        reused = v[j] if reuse == "velocity" else x[k] - x[j] + v[j]
        K, B = fit_rectification(RectifySums.of(reused, v[k], mode="scalar"))
        assert (gain[k] - K).abs() < 1e-9
        assert (bias[k] - B).abs() < 1e-9
    assert gain[list(steps)].tolist() == [0.0] * 4
    assert bias[list(steps)].tolist() == [-2.0] * 4
