"""What a reused step returns, the L1 distance, the error terms, the calibration walk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.residual import (
    Cache,
    ReusedStep,
    accumulated_deviation,
    relative_l1,
    residual,
    reuse_residual,
    safe_ratio,
    shift_error,
    walk_schedule,
)
from ertacache.core.solver import AdamsBashforth, Euler, run_reference

RING = GaussianRing(2.0, 0.3)
TABLE = shifted_sigmas(12)
STEPS = (0, 2, 5, 8, 11)


def test_residual_and_its_reuse_are_inverse_at_the_same_latent() -> None:
    x, v = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.25])
    assert torch.equal(reuse_residual(x, residual(v, x)), v)


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


def plain(at: ReusedStep) -> Tensor:
    return at.reused


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_deviation_is_the_accumulated_shift_error(reuse: str) -> None:
    """Eq. 11 holds to rounding when eps is taken against the reference run."""
    reference = run_reference(RING.velocity, RING.noise(16, seed=1), sigmas=TABLE)
    x, eps, deviations = reference.latents[0], [], []
    solver = Euler(TABLE)
    for k, (x_ref, v_ref) in enumerate(zip(reference.latents[1:], reference.outputs, strict=True)):
        if k in STEPS:
            v_tilde = RING.velocity(x, TABLE[k])
            cache = Cache.of(v_tilde, x, reuse=reuse)  # type: ignore[arg-type]
        else:
            v_tilde = cache.reuse(x)
        x = solver.step(v_tilde, k, x)
        eps.append(shift_error(v_tilde, v_ref))
        deviations.append(x - x_ref)
    predicted = accumulated_deviation(eps, TABLE.diff())
    assert torch.stack(deviations).abs().max() > 0.01
    torch.testing.assert_close(predicted, torch.stack(deviations), rtol=0, atol=1e-14)


def test_accumulated_deviation_takes_a_tensor_or_a_sequence() -> None:
    eps = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    d = torch.tensor([-0.5, -0.25, -0.25], dtype=torch.float64)
    assert torch.equal(accumulated_deviation(eps, d), accumulated_deviation(list(eps), d))


@pytest.mark.parametrize("solver", [Euler, AdamsBashforth])
def test_walk_visits_reused_steps_in_order_with_the_truth(solver: type[Euler]) -> None:
    noise, seen = RING.noise(4, seed=2), []

    def visit(at: ReusedStep) -> Tensor:
        seen.append(at.step)
        return at.computed

    end = walk_schedule(
        RING.velocity, noise, sigmas=TABLE, compute_steps=STEPS, reuse="residual", solver=solver,
        visit=visit,
    )  # fmt: skip
    assert seen == [k for k in range(12) if k not in STEPS]
    # Using the truth everywhere is the untouched run, to the bit.
    assert torch.equal(
        end, run_reference(RING.velocity, noise, sigmas=TABLE, solver=solver).latents[-1]
    )


def test_walk_hands_over_the_output_that_the_step_before_used() -> None:
    used: list[Tensor] = []

    def visit(at: ReusedStep) -> Tensor:
        if used and at.step != 3:
            assert at.previous is used[-1]
        used.append(at.reused / 2)
        return used[-1]

    walk_schedule(
        RING.velocity, RING.noise(3, seed=3), sigmas=TABLE, compute_steps=(0, 2, 11),
        reuse="velocity", solver=Euler, visit=visit,
    )  # fmt: skip
    assert len(used) == 9


def test_walk_refuses_a_schedule_without_step_0() -> None:
    with pytest.raises(ValueError, match="step 0"):
        walk_schedule(
            RING.velocity, RING.noise(1, seed=0), sigmas=TABLE, compute_steps=(1, 2),
            reuse="velocity", solver=Euler, visit=plain,
        )  # fmt: skip
