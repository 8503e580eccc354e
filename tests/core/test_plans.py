"""Plans that cannot be run are refused; compute schedules and numbers of computed steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ertacache.core.flows import shifted_sigmas
from ertacache.core.groups import Groups
from ertacache.core.plans import (
    PaperPlan,
    Target,
    TrajectoryPlan,
    check_compute_steps,
    step_strip,
    steps_for_speedup,
    uniform_schedule,
)

SIGMAS = shifted_sigmas(4)
Z = torch.ones(4, 1, 3, dtype=torch.float64)


def test_a_plan_knows_its_sizes() -> None:
    plan = TrajectoryPlan((0, 2), Z)
    assert (plan.num_steps, plan.history) == (4, 2)
    plan.check_shape((3, 64, 64))
    assert PaperPlan((0, 3), "residual", SIGMAS).num_steps == 4


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((), "step 0 must be computed"),
        ((1, 2), "step 0 must be computed"),
        ((0, 2, 2), "strictly increasing"),
        ((0, 4), "holds 4, but the run has 4 steps"),
    ],
)
def test_compute_schedules_that_cannot_be_run(steps: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_compute_steps(steps, 4)
    with pytest.raises(ValueError, match=sentence):
        TrajectoryPlan(steps, Z)
    with pytest.raises(ValueError, match=sentence):
        PaperPlan(steps, "residual", SIGMAS)


@pytest.mark.parametrize("shape", [(4, 3), (0, 1, 3), (4, 2, 3), (4, 1, 1)])
def test_coefficients_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \(T, 1, 1 \+ H\)"):
        TrajectoryPlan((0,), torch.ones(shape, dtype=torch.float64))


def test_a_plan_with_groups_and_a_second_history_knows_its_sizes() -> None:
    z = torch.ones(4, 6, 5, dtype=torch.float64)
    plan = TrajectoryPlan((0, 2), z, Groups(2, 3))
    assert (plan.num_steps, plan.history) == (4, 4)
    both = TrajectoryPlan((0, 2), z, Groups(2, 3), branch=True)
    assert both.history == 2
    both.check_shape((3, 64, 64))


def test_coefficients_that_do_not_fit_the_groups_or_the_branch() -> None:
    z = torch.ones(4, 6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"shape \(T, 4, 1 \+ H\), got \(4, 6, 4\)"):
        TrajectoryPlan((0, 2), z, Groups(2, 2))
    with pytest.raises(ValueError, match=r"shape \(T, 6, 1 \+ 2 H\), got \(4, 6, 4\)"):
        TrajectoryPlan((0, 2), z, Groups(2, 3), branch=True)
    z[2, 5, 0] = 2.0
    with pytest.raises(ValueError, match="the same coefficient of the latent"):
        TrajectoryPlan((0, 2), z, Groups(2, 3))


def test_coefficients_that_are_not_numbers() -> None:
    broken = Z.clone()
    broken[1, 0, 2] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        TrajectoryPlan((0, 2), broken)
    with pytest.raises(ValueError, match=r"float64, got torch\.float32"):
        TrajectoryPlan((0, 2), Z.float())


def test_the_papers_plans_that_cannot_be_run() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    for sentence, arguments in {
        "computes the last step": ((0, 2), "residual", SIGMAS),
        "must not increase": ((0, 3), "residual", SIGMAS.flip(0)),
        r"shape \(T \+ 1,\)": ((0, 3), "residual", SIGMAS[None]),
        "'residual' or 'velocity'": ((0, 3), "features", SIGMAS),
        "come together": ((0, 3), "residual", SIGMAS, zeros),
        r"must have shape \(4, ...\)": ((0, 3), "residual", SIGMAS, zeros[1:], zeros[1:]),
        "bias holds a number that is not finite": (
            (0, 3),
            "residual",
            SIGMAS,
            zeros,
            zeros / 0,
        ),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            PaperPlan(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "shape", "fits"),
    [
        ((), (3, 8, 8), True),
        ((3, 1, 1), (3, 8, 8), True),
        ((3, 8, 8), (3, 8, 8), True),
        ((3, 8, 8), (3, 9, 8), False),
        ((2, 1, 1), (3, 8, 8), False),
        ((1, 3, 1, 1), (3, 8, 8), False),
    ],
)
def test_a_rectification_fits_a_latent_or_not(
    own: tuple[int, ...], shape: tuple[int, ...], fits: bool
) -> None:
    gain = torch.zeros(4, *own, dtype=torch.float64)
    plan = PaperPlan((0, 3), "residual", SIGMAS, gain, gain)
    if fits:
        plan.check_shape(shape)
        return
    with pytest.raises(ValueError, match="generate at the calibrated size"):
        plan.check_shape(shape)


@pytest.mark.parametrize(
    ("num_steps", "speedup", "steps"),
    [
        (30, 1.0, 30),
        (30, 2.0, 15),
        (30, 2.8, 10),  # at least 2.8 times: not 11
        (50, 3.0, 16),
        (30, 30 / 7, 7),  # a ratio that is not exact in binary
        (30, 15.0, 2),
    ],
)
def test_a_speedup_is_the_most_steps_that_reach_it(
    num_steps: int, speedup: float, steps: int
) -> None:
    assert steps_for_speedup(num_steps, speedup) == steps


@pytest.mark.parametrize("speedup", [0.5, 15.1, float("nan")])
def test_a_speedup_outside_the_run_is_refused(speedup: float) -> None:
    with pytest.raises(ValueError, match=r"speedup must be between 1 and 15, got"):
        steps_for_speedup(30, speedup)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 200).flatmap(lambda T: st.tuples(st.just(T), st.integers(2, T))))
def test_every_number_of_steps_is_that_of_its_own_speedup(size: tuple[int, int]) -> None:
    num_steps, budget = size
    assert steps_for_speedup(num_steps, num_steps / budget) == budget
    assert Target(speedup=num_steps / budget).budget(num_steps) == budget


@pytest.mark.parametrize(
    ("target", "num_steps", "budget"),
    [
        (Target(speedup=1.0), 30, 30),
        (Target(speedup=2.8), 30, 10),  # the rule of steps_for_speedup
        (Target(speedup=3.0), 4, 2),  # at least two steps are computed
        (Target(speedup=3.0), 1, 1),
        (Target(compute_steps=7), 30, 7),
        (Target(compute_steps=7), 5, 5),
        (Target(compute_steps=1), 5, 1),
        (Target(min_psnr=40.0), 30, None),
        (Target(), 30, None),
    ],
)
def test_the_budget_of_a_target(target: Target, num_steps: int, budget: int | None) -> None:
    assert target.budget(num_steps) == budget


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["speedup", "min_psnr"])
def test_targets_that_are_not_finite(name: str, number: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a finite number.*, got {number:g}"):
        Target(**{name: number})


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({"speedup": 0.0}, "speedup must be a finite number of at least 1, got 0"),
        ({"speedup": 0.99}, "speedup must be a finite number of at least 1, got 0.99"),
        ({"compute_steps": 0}, "compute_steps must be an integer of at least 1, got 0"),
        ({"compute_steps": float("nan")}, "an integer of at least 1, got nan"),
        ({"compute_steps": float("inf")}, "an integer of at least 1, got inf"),
        ({"compute_steps": 2.5}, "an integer of at least 1, got 2.5"),
        ({"min_psnr": 0.0}, "min_psnr must be a finite number of dB above 0, got 0"),
        ({"speedup": 2.0, "min_psnr": 30.0}, "give one target, not speedup and min_psnr"),
    ],
)
def test_targets_that_are_none(target: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Target(**target)


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


def test_a_strip_has_one_character_per_step() -> None:
    assert step_strip((0, 1, 4), 6) == "██··█·"
