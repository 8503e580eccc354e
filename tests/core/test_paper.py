"""The paper's equations on tensors and profiles: reuse, thresholds, phi, gain and bias."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.gram import Trajectory, profile_run
from ertacache.core.paper import (
    Cache,
    RectifyMode,
    RectifySums,
    adjusted_sigmas,
    fit_rectification,
    pick_schedule,
    profile_plan,
    profile_rectification,
    profile_step_scales,
    rectify,
    relative_l1,
    residual,
    reuse_distances,
    safe_ratio,
    search_profile,
    shift_error,
    step_scale,
    sweep_profile,
)
from ertacache.core.plans import PaperPlan, Reuse
from ertacache.core.sampler import Euler, run_reference
from tests.core.rings import measured_scales

RING = GaussianRing(2.0, 0.3)
NOISE = RING.noise(32, seed=0)
SIGMAS = shifted_sigmas(12)
STEPS = (0, 2, 5, 8, 11)
MODES: list[RectifyMode] = ["scalar", "channel", "element"]


# Reuse and its errors, eq. 5 to 12


def test_residual_and_its_reuse_are_inverse_at_the_same_latent() -> None:
    x, v = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.25])
    for reuse in ("residual", "velocity"):
        assert torch.equal(Cache.of(v, x, reuse=reuse).reuse(x), v)  # type: ignore[arg-type]
    assert torch.equal(Cache.of(v, x, reuse="residual").feature, residual(v, x))


def test_cache_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'residual' or 'velocity'"):
        Cache.of(torch.ones(1), torch.ones(1), reuse="features")  # type: ignore[arg-type]


def test_relative_l1_by_hand_and_at_zero() -> None:
    a, b = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert relative_l1(a, b, reference=torch.full((2, 2), 1.5)) == 0.5
    assert relative_l1(a, a, reference=torch.zeros(2, 2)) == 0.0
    assert relative_l1(a, b, reference=torch.zeros(2, 2)) == float("inf")


def test_relative_l1_sums_in_float64() -> None:
    many = torch.full((257,), 0.1, dtype=torch.bfloat16)  # bfloat16 itself has no 257
    assert relative_l1(many, torch.zeros_like(many), reference=many[:1]) == 257
    assert relative_l1(many[:1], 0 * many[:1], reference=many) == 1 / 257


def test_safe_ratio_keeps_shape_and_broadcasts() -> None:
    ratio = safe_ratio(torch.tensor([[0.0, 2.0], [3.0, 0.0]]), torch.tensor([0.0, 4.0]))
    assert ratio.tolist() == [[0.0, 0.5], [float("inf"), 0.0]]


def accumulated_deviation(shift_errors: Tensor, intervals: Tensor) -> Tensor:
    """Eq. 11: ``delta[k+1] = sum_{j <= k} d[j] eps[j]`` for eps of shape (T, ...) and d of (T,)."""
    d = intervals.reshape(-1, *[1] * (shift_errors.ndim - 1))
    return torch.cumsum(d * shift_errors, dim=0)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_deviation_is_the_accumulated_shift_error(reuse: Reuse) -> None:
    """Eq. 9 to 11 hold to rounding when eps is taken against the reference run."""
    reference = run_reference(RING.velocity, RING.noise(16, seed=1), sigmas=SIGMAS)
    x, eps, deviations = reference.latents[0], list[Tensor](), list[Tensor]()
    solver = Euler(SIGMAS)
    for k, (x_ref, v_ref) in enumerate(zip(reference.latents[1:], reference.outputs, strict=True)):
        if k in STEPS:
            v_tilde = RING.velocity(x, SIGMAS[k])
            cache = Cache.of(v_tilde, x, reuse=reuse)
        else:
            v_tilde = cache.reuse(x)
        x = solver.step(v_tilde, k, x)
        eps.append(shift_error(v_tilde, v_ref))
        deviations.append(x - x_ref)
    predicted = accumulated_deviation(torch.stack(eps), SIGMAS.diff())
    assert torch.stack(deviations).abs().max() > 0.01
    torch.testing.assert_close(predicted, torch.stack(deviations), rtol=0, atol=1e-14)


# Algorithm 2 on a profile


def outputs_l1(full: Trajectory) -> tuple[Tensor, Tensor]:
    """L1 distances of the outputs of any two steps, and their norms, as sums over elements."""
    v = torch.stack(full.outputs, 1)
    return (v[:, :, None] - v[:, None]).abs().sum(-1), v.abs().sum(-1)


def residuals_l1(full: Trajectory) -> tuple[Tensor, Tensor]:
    """The same of the residuals."""
    r = torch.stack([residual(v, x) for v, x in zip(full.outputs, full.latents, strict=False)], 1)
    return (r[:, :, None] - r[:, None]).abs().sum(-1), r.abs().sum(-1)


def ring_run(num_steps: int = 20) -> Trajectory:
    return run_reference(RING.velocity, RING.noise(8, seed=0), sigmas=shifted_sigmas(num_steps))


@pytest.mark.parametrize("steps", [1, 2])
def test_profile_search_of_a_run_too_short_to_reuse(steps: int) -> None:
    l1, norm = torch.zeros(1, steps, steps), torch.ones(1, steps)
    assert search_profile(l1, norm, threshold=9.0) == tuple(range(steps))


def test_profile_search_sums_over_prompts_before_it_divides() -> None:
    l1, norm = torch.zeros(2, 3, 3), torch.ones(2, 3)
    l1[0, 0, 1], norm[1, 1] = 1.0, 9.0  # 1 / (1 + 9) = 0.1
    assert search_profile(l1, norm, threshold=0.11) == (0, 2)
    assert search_profile(l1, norm, threshold=0.1) == (0, 1, 2)


def test_sweep_holds_every_schedule() -> None:
    l1, norm = residuals_l1(ring_run())
    sweep = sweep_profile(l1, norm)
    distances = (l1.sum(0) / norm.sum(0)).flatten().unique().tolist()
    for lam in [*distances, *(math.nextafter(d, math.inf) for d in distances), 1e9]:
        below = max(key for key in sweep if key <= lam)
        assert sweep[below] == search_profile(l1, norm, threshold=lam)
    assert sweep[0.0] == tuple(range(20))
    assert list(sweep.values())[-1] == (0, 19)


@pytest.mark.parametrize("budget", range(2, 21))
def test_pick_schedule_stays_within_the_budget(budget: int) -> None:
    sweep = sweep_profile(*residuals_l1(ring_run()))
    lam, steps = pick_schedule(sweep, budget)
    assert sweep[lam] == steps
    assert len(steps) == max(len(s) for s in sweep.values() if len(s) <= budget)
    assert lam == min(key for key, s in sweep.items() if len(s) == len(steps))


def test_pick_schedule_without_a_schedule_is_an_error() -> None:
    with pytest.raises(ValueError, match="larger thresholds"):
        pick_schedule({0.1: (0, 1, 2)}, 2)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_the_distances_of_a_profile_are_those_of_the_run(reuse: Reuse) -> None:
    full = ring_run(6)
    l1, norm = reuse_distances(profile_run(full), reuse)
    expected = residuals_l1(full) if reuse == "residual" else outputs_l1(full)
    for found, sums in zip((l1, norm), expected, strict=True):
        torch.testing.assert_close(2 * found, sums, rtol=0, atol=1e-12)  # means over 2 elements


# Phi and the adjusted sigma schedule, eq. 13 and 14


def test_step_scale_by_hand_and_clipped() -> None:
    v, before = torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0])
    assert step_scale(torch.tensor([1.5, 0.5]), v, previous=before) == 0.75
    assert step_scale(v, v, previous=before) == 1.0
    assert step_scale(torch.tensor([9.0, 9.0]), v, previous=before) == 0.0


def test_step_scale_where_the_output_does_not_change() -> None:
    v = torch.ones(3)
    assert step_scale(v, v, previous=v) == 1.0
    assert step_scale(2 * v, v, previous=v) == 0.0


def test_adjusted_sigmas_by_hand() -> None:
    """Half a step, then the rest in proportion to the nominal intervals 1/2 and 1/4."""
    sigmas = torch.tensor([2.0, 1.0, 0.75, 0.25, 0.0])
    phi = torch.tensor([1.0, 0.5, 1.0, 1.0])
    # after step 1: 1 - 0.125 = 0.875, of which step 2 takes 0.5 / 0.75
    expected = torch.tensor([2.0, 1.0, 0.875, 0.875 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(adjusted_sigmas(sigmas, phi), expected, rtol=0, atol=1e-15)


descending = st.lists(
    st.floats(1e-3, 1e3), min_size=2, max_size=40, unique=True
).map(lambda s: torch.tensor(sorted(s, reverse=True), dtype=torch.float64))  # fmt: skip
schedules = descending.flatmap(
    lambda s: st.tuples(
        st.just(s),
        st.lists(
            st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=len(s) - 2, max_size=len(s) - 2
        ),
    )
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schedules)
def test_adjusted_sigmas_are_monotone_and_keep_their_ends(case: tuple[torch.Tensor, list]) -> None:
    sigmas, scales = case
    adjusted = adjusted_sigmas(sigmas, torch.tensor([*scales, 1.0]))
    assert adjusted[0] == sigmas[0]
    assert adjusted[-1] == sigmas[-1]
    assert bool((adjusted.diff() <= 0).all())
    assert bool((adjusted >= sigmas - 1e-9).all())  # a shrunk step only ever leaves more to do
    for k, phi in enumerate(scales):
        assert phi > 0 or adjusted[k + 1] == adjusted[k]
    PaperPlan(tuple(range(len(sigmas) - 1)), "residual", adjusted)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(descending)
def test_unscaled_sigmas_are_unchanged_to_the_bit(sigmas: torch.Tensor) -> None:
    assert torch.equal(adjusted_sigmas(sigmas, torch.ones(len(sigmas) - 1)), sigmas)


def test_adjusted_sigmas_are_not_rounded_upwards() -> None:
    sigma = 0.10152422185672019
    following = math.nextafter(sigma, 0)
    assert 0.2 * following + 0.8 * sigma > sigma
    sigmas = torch.tensor([sigma, following, 0.0], dtype=torch.float64)
    scales = torch.tensor([0.2, 1.0], dtype=torch.float64)
    assert adjusted_sigmas(sigmas, scales).tolist() == [sigma, sigma, 0.0]


def test_adjusted_sigmas_of_float32_are_float64() -> None:
    sigmas = shifted_sigmas(30).float()
    adjusted = adjusted_sigmas(sigmas, torch.ones(30))
    assert adjusted.dtype == torch.float64
    assert torch.equal(adjusted.float(), sigmas)


@pytest.mark.parametrize(
    ("sigmas", "scales", "message"),
    [
        ([1.0, 0.5, 0.0], [1.0], "as many step_scales"),
        ([1.0, 1.0, 0.0], [1.0, 1.0], "strictly descending"),
        ([1.0, 0.5, 0.0], [1.5, 1.0], "between 0 and 1"),
        ([1.0, 0.5, 0.0], [float("nan"), 1.0], "between 0 and 1"),
        ([1.0, 0.5, 0.0], [1.0, 0.5], "last step"),
    ],
)
def test_adjusted_sigmas_refuse(sigmas: list[float], scales: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adjusted_sigmas(torch.tensor(sigmas), torch.tensor(scales))


def test_profile_scales_are_the_measured_ones_for_single_reuse() -> None:
    """With one reused step after computed ones only, both compare the same two outputs."""
    sigmas, steps = shifted_sigmas(6), (0, 1, 3, 4, 5)
    full = run_reference(RING.velocity, NOISE, sigmas=sigmas)
    (residual_l1, _), (output_l1, _) = residuals_l1(full), outputs_l1(full)
    phi = profile_step_scales(residual_l1, output_l1, compute_steps=steps)
    measured = measured_scales(RING.velocity, NOISE, sigmas=sigmas, compute_steps=steps)
    torch.testing.assert_close(phi, measured, rtol=0, atol=1e-12)
    assert 0 < phi[2] < 1


def test_profile_scales_of_velocity_reuse_are_zero() -> None:
    full = run_reference(RING.velocity, NOISE, sigmas=shifted_sigmas(9))
    l1, _ = outputs_l1(full)
    phi = profile_step_scales(l1, l1, compute_steps=(0, 2, 4, 6, 8))
    assert phi.tolist() == [1.0, 0.0] * 4 + [1.0]


# Gain and bias, eq. 15 to 21


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
def test_from_the_profile_alone_where_outputs_depend_on_sigma_alone(reuse: Reuse) -> None:
    """Then outputs at accelerated latents are the reference ones, and both fits must agree."""
    slopes = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)

    def blind(x: Tensor, sigma: Tensor) -> Tensor:
        return (torch.cos(4 * sigma * slopes) + slopes).expand_as(x)

    noise = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigmas, steps = shifted_sigmas(8), (0, 2, 3, 7)
    full = run_reference(blind, noise, sigmas=sigmas)
    statistics = profile_run(full)
    gain, bias = profile_rectification(statistics, compute_steps=steps, reuse=reuse)
    for k in set(range(8)) - set(steps):
        j = max(step for step in steps if step < k)
        x, v = full.latents, full.outputs
        reused = v[j] if reuse == "velocity" else x[k] - x[j] + v[j]
        K, B = fit_rectification(RectifySums.of(reused, v[k], mode="scalar"))
        assert (gain[k] - K).abs() < 1e-9
        assert (bias[k] - B).abs() < 1e-9
    assert gain[list(steps)].tolist() == [0.0] * 4
    assert bias[list(steps)].tolist() == [-2.0] * 4


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_a_plan_from_the_profile_has_the_parts_that_are_wanted(reuse: Reuse) -> None:
    statistics = profile_run(run_reference(RING.velocity, NOISE, sigmas=SIGMAS))
    bare = profile_plan(
        statistics,
        SIGMAS,
        compute_steps=STEPS,
        reuse=reuse,
        adjust_timesteps=False,
        rectify=False,
    )
    assert (bare.compute_steps, bare.reuse, bare.gain, bare.bias) == (STEPS, reuse, None, None)
    assert torch.equal(bare.sigmas, SIGMAS)
    plan = profile_plan(statistics, SIGMAS, compute_steps=STEPS, reuse=reuse)
    l1, _ = reuse_distances(statistics, reuse)
    phi = profile_step_scales(l1, statistics.output_l1, compute_steps=STEPS)
    gain, bias = profile_rectification(statistics, compute_steps=STEPS, reuse=reuse)
    assert torch.equal(plan.sigmas, adjusted_sigmas(SIGMAS, phi))
    assert plan.gain is not None
    assert plan.bias is not None
    assert torch.equal(plan.gain, gain)
    assert torch.equal(plan.bias, bias)
