"""TaylorSeer: the same bits as through diffusers' own call, and the steps it computes."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.taylorseer import TaylorSeer, choose_interval, computed_steps
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.direct import directly


@pytest.mark.parametrize("budget", [4, 5, 6])
def test_same_bits_as_used_directly(subject: Subject, budget: int) -> None:
    baseline = TaylorSeer()
    expected = directly(subject.name, lambda pipe: baseline.config(pipe, budget, STEPS))
    with baseline.attach(subject.pipe, budget, num_inference_steps=STEPS) as handle:
        assert torch.equal(subject.generate(), expected)
    calls = BLOCKS * subject.branches
    computed = len(computed_steps(STEPS, *choose_interval(STEPS, budget)))
    assert handle.stats == BaselineStats("blocks", computed * calls, (STEPS - computed) * calls)
    assert torch.equal(subject.generate(), subject.full_run)


def test_full_budget_changes_nothing(subject: Subject) -> None:
    with TaylorSeer().attach(subject.pipe, STEPS, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)


def test_budgets_are_met_within_one_step() -> None:
    for steps in (30, 50):
        for budget in range(5, steps + 1):
            found = len(computed_steps(steps, *choose_interval(steps, budget)))
            assert budget - 1 <= found <= budget
    with pytest.raises(ValueError, match="no interval computes at most 3 of 30"):
        choose_interval(30, 3)
