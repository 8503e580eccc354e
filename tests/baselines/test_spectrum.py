"""Spectrum: which steps are computed, what is forecast, and what is forecast exactly."""

from __future__ import annotations

import math

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.spectrum import (
    Spectrum,
    choose_window,
    computed_steps,
    forecast_weights,
)
from tests.baselines.cases import BLOCKS, STEPS, Subject, count
from tests.baselines.toy import ToyPipe, known_blocks

PAST = [0, 1, 2, 3, 4, 6, 8, 11]


def forecast(values: list[float], step: int, **settings: float) -> float:
    weights = forecast_weights(PAST, step, num_steps=30, **settings)
    return sum(w * x for w, x in zip(weights, values, strict=True))


def test_polynomials_of_time_are_forecast_exactly_without_a_ridge() -> None:
    def quartic(k: int) -> float:
        return 3 - 0.5 * k + 0.25 * k**2 - 0.01 * k**3 + 0.001 * k**4

    for step in (12, 13, 15):
        found = forecast([quartic(k) for k in PAST], step, ridge=0.0, share=1.0)
        assert found == pytest.approx(quartic(step))
    # Half of it is the straight line through the last two values.
    line = quartic(11) + (14 - 11) * (quartic(11) - quartic(8)) / 3
    found = forecast([quartic(k) for k in PAST], 14, ridge=0.0, share=0.5)
    assert found == pytest.approx((quartic(14) + line) / 2)


def test_ridge_pulls_towards_zero() -> None:
    # Of a constant fitted alone, n values become their sum over n + ridge.
    weights = forecast_weights([0, 1, 2], 3, num_steps=8, degree=0, ridge=0.5, share=1.0)
    assert weights == pytest.approx([1 / 3.5] * 3)
    ones = [1.0] * len(PAST)
    assert 0.5 < forecast(ones, 12, share=1.0) < 1
    assert forecast(ones, 12, share=1.0, ridge=0.01) > forecast(ones, 12, share=1.0)


def test_computed_steps_are_those_of_the_published_counters() -> None:
    """The authors count reused steps in a row and compute on multiples of the window."""
    for growth in (0.0, 0.3, 0.75, 3.0):
        window, reused, expected = 2.0, 0, []
        for step in range(50):
            if step < 5 or (reused + 1) % math.floor(window) == 0:
                expected.append(step)
                window = round(window + (growth if step >= 5 else 0), 3)
                reused = 0
            else:
                reused += 1
        assert list(computed_steps(50, 2, growth)) == expected


@pytest.mark.parametrize("steps", [30, 50])
def test_budgets_from_three_halves_to_five_are_met(steps: int) -> None:
    for budget in range(math.floor(steps / 5), math.floor(steps / 1.5) + 1):
        assert len(computed_steps(steps, *choose_window(steps, budget))) == budget
    with pytest.raises(ValueError, match="no window computes at most 5 of 30"):
        choose_window(30, 5)
    assert computed_steps(3, *choose_window(3, 3)) == (0, 1, 2)


@pytest.mark.parametrize("on_outputs", [False, True])
def test_quartic_inputs_of_a_linear_network(on_outputs: bool) -> None:
    """Features 16 x are polynomials of the step, one per branch, and forecast as computed."""
    rows = [[1.0 + k, 2.0 - 0.1 * k**2 + 0.01 * k**4] for k in range(STEPS)]
    pipe = ToyPipe()
    method = Spectrum(on_outputs=on_outputs, ridge=0.0, share=1.0)
    with known_blocks(), method.attach(pipe, 6, num_inference_steps=STEPS) as handle:
        assert pipe(rows) == [pytest.approx([16 * x for x in row], rel=1e-4) for row in rows]
        # What is given to a reused step does not matter: 5 and 7 are forecast.
        rows[5] = rows[7] = [0.0, 0.0]
        found = pipe(rows)
    assert found[5][0] == pytest.approx(16 * 6.0, rel=1e-4)
    assert found[7][0] == pytest.approx(16 * 8.0, rel=1e-4)
    unit, per_call = ("network calls", 1) if on_outputs else ("blocks", BLOCKS)
    assert handle.stats == BaselineStats(unit, 2 * 2 * 6 * per_call, 2 * 2 * 2 * per_call)


@pytest.mark.parametrize("on_outputs", [False, True])
def test_branch_that_begins_late_is_computed(on_outputs: bool) -> None:
    rows = [[1.0]] * 3 + [[1.0, 3.0 + k**2] for k in range(5)]
    pipe, method = ToyPipe(), Spectrum(on_outputs=on_outputs)
    with known_blocks(), method.attach(pipe, 6, num_inference_steps=STEPS):
        found = pipe(rows)
    assert [row[1] for row in found[3:]] == [16 * row[1] for row in rows[3:]]


def test_reused_steps_run_the_head_alone(any_subject: Subject) -> None:
    head = any_subject.network.get_submodule(
        "final_layer" if any_subject.name == "opensora" else "proj_out"
    )
    with (
        Spectrum().attach(any_subject.pipe, 6, num_inference_steps=STEPS) as handle,
        count(head) as calls,
    ):
        assert not torch.equal(any_subject.generate(), any_subject.full_run)
    branches = any_subject.branches
    assert handle.stats == BaselineStats("blocks", 6 * BLOCKS * branches, 2 * BLOCKS * branches)
    assert len(calls) == STEPS * branches


def test_on_outputs_reused_steps_run_nothing(any_subject: Subject) -> None:
    method = Spectrum(on_outputs=True)
    with (
        method.attach(any_subject.pipe, 6, num_inference_steps=STEPS) as handle,
        count(any_subject.network.get_submodule(_first_list(any_subject))[0]) as calls,
    ):
        assert not torch.equal(any_subject.generate(), any_subject.full_run)
    assert handle.stats.reused == 2 * any_subject.branches
    assert len(calls) == 6 * any_subject.branches


def _first_list(subject: Subject) -> str:
    lists = {"wan": "blocks", "opensora": "spatial_blocks"}
    return lists.get(subject.name, "transformer_blocks")


@pytest.mark.parametrize("on_outputs", [False, True])
def test_full_budget_changes_nothing(on_outputs: bool, subject: Subject) -> None:
    method = Spectrum(on_outputs=on_outputs)
    with method.attach(subject.pipe, STEPS, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)
