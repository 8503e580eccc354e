"""The seven corrections: what the paper prints fails, what we do instead holds.

The printed forms live here and nowhere else. ``docs/corrections.md`` quotes the numbers that are
asserted here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import GaussianRing, rmse
from ertacache.core.paper import (
    Cache,
    RectifySums,
    adjusted_sigmas,
    fit_rectification,
    rectify,
    step_scale,
)
from ertacache.core.plans import PaperPlan, Reuse, uniform_schedule
from ertacache.core.sampler import Denoise, Euler, run_reference
from tests.core.rings import Counted, measured_scales, rectified_plan

RING = GaussianRing(2.0, 0.3)
SIGMAS = torch.linspace(1, 0, 31, dtype=torch.float64)
STEPS = uniform_schedule(30, 10)
CALIBRATION, HELD_OUT = RING.noise(64, seed=0), RING.noise(64, seed=1)

Correct = Callable[[int, Tensor], Tensor]


def run(
    velocity: Denoise,
    x: Tensor,
    sigmas: Tensor,
    *,
    steps: Collection[int] = STEPS,
    reuse: Reuse = "residual",
    correct: Correct = lambda k, v_tilde: v_tilde,
) -> Tensor:
    """The accelerated Euler run; ``correct`` sees every reused output."""
    solver = Euler(sigmas)
    for k in range(len(sigmas) - 1):
        if k in steps:
            v = velocity(x, sigmas[k])
            cache = Cache.of(v, x, reuse=reuse)
        else:
            v = correct(k, cache.reuse(x))
        x = solver.step(v, k, x)
    return x


def full_run() -> Tensor:
    return run_reference(RING.velocity, HELD_OUT, sigmas=SIGMAS).latents[-1]


def printed_bias(sums: RectifySums, gain: Tensor) -> Tensor:
    """Eq. 21 as printed."""
    return 4 * (sums.mean_shift - 0.5) - 4 * gain * sums.mean_output


def printed_rectify(v_tilde: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Eq. 15 as Algorithm 1 prints it."""
    return v_tilde - torch.sigmoid(gain * v_tilde + bias)


def printed_sigmas(step_scales: Tensor, *, descending: bool) -> Tensor:
    """Eq. 13 and 14 as printed; i counts up as in its sum, or down as in Algorithm 1."""
    T = len(step_scales)
    used, interval, sigmas = 0.0, 1 / T, [1.0]
    for k, phi in enumerate(step_scales.tolist()):
        used += interval * phi
        sigmas.append(1 - used)
        i = T - 1 - k if descending else k
        interval = (1 - used) / (1 - i / T)
    return torch.tensor(sigmas, dtype=torch.float64)


def test_correction_1_bias() -> None:
    """eps = v~ / 10: ours removes it, the printed bias is off by 3/4 K v_bar everywhere."""
    v_tilde = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    v = 0.9 * v_tilde
    sums = RectifySums.of(v_tilde, v, mode="scalar")
    K, B = fit_rectification(sums)
    assert (K.item(), B.item()) == (pytest.approx(0.4), pytest.approx(-2.0))
    torch.testing.assert_close(rectify(v_tilde, gain=K, bias=B), v, rtol=0, atol=1e-15)

    B_printed = printed_bias(sums, K)
    assert B_printed.item() == pytest.approx(-4.4)
    off = rectify(v_tilde, gain=K, bias=B_printed) - v
    torch.testing.assert_close(off, torch.full_like(v, 0.6), rtol=0, atol=1e-15)


def test_correction_2_line_not_sigmoid() -> None:
    """The fit is of a line; its sigmoid adds an error of 0.119 where there was none."""
    v = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    K, B = fit_rectification(RectifySums.of(v, v, mode="scalar"))
    assert torch.equal(rectify(v, gain=K, bias=B), v)
    assert (v - printed_rectify(v, K, B)).flatten().tolist() == pytest.approx(
        [0.1192] * 3, abs=1e-4
    )

    plan = rectified_plan(RING.velocity, CALIBRATION, PaperPlan(STEPS, "residual", SIGMAS))
    gain, bias = plan.gain, plan.bias
    assert gain is not None
    assert bias is not None
    target = full_run()
    plain = rmse(run(RING.velocity, HELD_OUT, SIGMAS), target)
    line = rmse(
        run(
            RING.velocity,
            HELD_OUT,
            SIGMAS,
            correct=lambda k, v_tilde: rectify(v_tilde, gain=gain[k], bias=bias[k]),
        ),
        target,
    )
    sigmoid = rmse(
        run(
            RING.velocity,
            HELD_OUT,
            SIGMAS,
            correct=lambda k, v_tilde: printed_rectify(v_tilde, gain[k], bias[k]),
        ),
        target,
    )
    assert plain == pytest.approx(0.076, abs=5e-4)
    assert line == pytest.approx(0.034, abs=5e-4)
    assert sigmoid == pytest.approx(0.161, abs=5e-4)


def test_correction_3_remaining_interval() -> None:
    """Nothing reused: as printed the second of four steps is too long; ours is nominal."""
    ones = torch.ones(4)
    nominal = torch.linspace(1, 0, 5, dtype=torch.float64)
    assert printed_sigmas(ones, descending=False).tolist() == [1.0, 0.75, 0.0, 0.0, 0.0]
    assert printed_sigmas(ones, descending=True)[:3].tolist() == [1.0, 0.75, -2.25]
    assert torch.equal(adjusted_sigmas(nominal, ones), nominal)

    # One half step of four: the rest, 1 - 1/4 - 1/8, is shared by the two steps that remain.
    phi = torch.tensor([1.0, 0.5, 1.0, 1.0])
    assert adjusted_sigmas(nominal, phi).tolist() == [1.0, 0.75, 0.625, 0.3125, 0.0]


def printed_adjusted_run(velocity: Denoise, x: Tensor) -> list[float]:
    """Phi as Algorithm 1 defines it, from v_i of the very step that was to be reused."""
    scales = []
    for k in range(30):
        v = velocity(x, SIGMAS[k])
        if k in STEPS:
            cache, used = Cache.of(v, x, reuse="residual"), v
            scales.append(1.0)
        else:
            v_tilde = cache.reuse(x)
            scales.append(step_scale(v_tilde, v, previous=used))
            used = v_tilde
        x = x + SIGMAS.diff()[k] * used
    return scales


def test_correction_4_step_scales_before_the_run() -> None:
    """As printed phi needs the network on every step; ours is known, and holds for new noise."""
    online = Counted(RING.velocity)
    scales = torch.tensor(printed_adjusted_run(online, HELD_OUT), dtype=torch.float64)
    assert online.calls == 30

    phi = measured_scales(RING.velocity, CALIBRATION, sigmas=SIGMAS, compute_steps=STEPS)
    known = Counted(RING.velocity)
    run(known, HELD_OUT, adjusted_sigmas(SIGMAS, phi))
    assert known.calls == len(STEPS) == 10
    assert (phi - scales).abs().max() < 0.1


def test_correction_5_residual_reuse_is_damped() -> None:
    """Under Euler, x + r~ is (1 + d) v: on a straight path plain reuse is exact, this is not."""
    x, v, d = HELD_OUT, RING.velocity(HELD_OUT, 1.0), -0.1
    cache = Cache.of(v, x, reuse="residual")
    once = cache.reuse(x + d * v)
    torch.testing.assert_close(once, (1 + d) * v, rtol=0, atol=1e-14)
    twice = cache.reuse(x + d * v + d * once)
    torch.testing.assert_close(twice, (1 + d) ** 2 * v, rtol=0, atol=1e-14)

    def straight(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.full_like(x, 2.0)

    sigmas, steps = torch.linspace(1, 0, 5, dtype=torch.float64), (0, 3)
    start = torch.zeros(1, 1, dtype=torch.float64)
    assert run(straight, start, sigmas, steps=steps, reuse="velocity").item() == -2.0
    # 2 (1 + 3/4 + 9/16 + 1) / 4 instead of 2
    printed = run(straight, start, sigmas, steps=steps, reuse="residual").item()
    assert printed == pytest.approx(-1.65625, abs=1e-12)


def test_correction_6_velocity_reuse_has_no_step_scale() -> None:
    """The ratio is exactly 1, phi is 0, and the adjusted run is a run of fewer steps."""
    phi = measured_scales(
        RING.velocity, CALIBRATION, sigmas=SIGMAS, compute_steps=STEPS, reuse="velocity"
    )
    assert phi.tolist() == [float(k in STEPS) for k in range(30)]

    adjusted = adjusted_sigmas(SIGMAS, phi)
    fewer = torch.tensor([adjusted[k] for k in STEPS] + [0.0], dtype=torch.float64)
    accelerated = run(RING.velocity, HELD_OUT, adjusted, reuse="velocity")
    short = run_reference(RING.velocity, HELD_OUT, sigmas=fewer).latents[-1]
    assert torch.equal(accelerated, short)

    target = full_run()
    plain = rmse(run(RING.velocity, HELD_OUT, SIGMAS, reuse="velocity"), target)
    assert plain == pytest.approx(0.062, abs=5e-4)
    assert rmse(accelerated, target) == pytest.approx(0.201, abs=5e-4)


def test_correction_7_gain_free_of_resolution() -> None:
    """A K per element binds the policy to one size; per channel and scalar it does not."""
    generator = torch.Generator().manual_seed(0)
    slopes = torch.tensor([0.9, 1.1], dtype=torch.float64)[:, None, None]
    small = torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)
    large = torch.randn(1, 2, 6, 6, generator=generator, dtype=torch.float64)

    def corrected(mode: str) -> Tensor:
        K, B = fit_rectification(RectifySums.of(small, slopes * small, mode=mode))
        return rectify(large, gain=K, bias=B)

    with pytest.raises(RuntimeError, match="must match the size"):
        corrected("element")
    torch.testing.assert_close(corrected("channel"), slopes * large, rtol=0, atol=1e-14)
    # One slope for two channels that differ: it broadcasts, and can only average them.
    left = rmse(corrected("scalar"), slopes * large) / rmse(large, torch.zeros_like(large))
    assert left == pytest.approx(0.1, abs=0.01)


def proportional_sigmas(sigmas: Tensor, step_scales: Tensor) -> Tensor:
    """Intervals in proportion to phi d: possible once every phi is known before the run."""
    weights = step_scales * sigmas.diff()
    sigma = sigmas[0] + (sigmas[-1] - sigmas[0]) * weights.cumsum(0) / weights.sum()
    return torch.cat([sigmas[:1], sigma[:-1], sigmas[-1:]])


def test_finding_eq_14_counts_steps_that_will_be_empty() -> None:
    """Remaining budget over remaining steps makes computed steps too short, except the last."""
    phi = measured_scales(RING.velocity, CALIBRATION, sigmas=SIGMAS, compute_steps=STEPS)
    adjusted = adjusted_sigmas(SIGMAS, phi)
    assert adjusted[-2].item() == pytest.approx(0.40, abs=5e-3)  # nominal: 1/30

    target = full_run()
    assert rmse(run(RING.velocity, HELD_OUT, SIGMAS), target) == pytest.approx(0.076, abs=5e-4)
    assert rmse(run(RING.velocity, HELD_OUT, adjusted), target) == pytest.approx(0.171, abs=5e-4)
    spread = proportional_sigmas(SIGMAS, phi)
    assert rmse(run(RING.velocity, HELD_OUT, spread), target) == pytest.approx(0.051, abs=5e-4)
