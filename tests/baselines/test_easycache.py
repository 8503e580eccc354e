"""EasyCache: reuse decisions of a sequence by hand, and what a reused step returns."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.easycache import EasyCache, EasyCacheRule
from tests.baselines.cases import STEPS, Subject
from tests.baselines.toy import ToyPipe

OUTPUTS = [10.0, 12.0, 13.0, 15.0, 16.0, 18.0, 20.0, 21.0]


def reused(rule: EasyCacheRule) -> list[int]:
    """The reused steps of a run whose inputs are 1, 2, 3, ..."""
    found = []
    for step, output in enumerate(OUTPUTS):
        x, v = torch.tensor([step + 1.0]), torch.tensor([output])
        if rule.reuses(step, x):
            found.append(step)
        else:
            rule.computed(step, x, v)
    return found


def test_estimates_are_added_up_until_the_threshold() -> None:
    # Step 1 gives the rate 2 / 1. Step 2: 2 * 1 / 12. Step 3 is 2 away from step 1: 2 * 2 / 12 more
    # is 0.5. Computed, it gives the rate 3 / 2. Step 4: 1.5 / 15, step 5: 3 / 15 more is 0.3.
    assert reused(EasyCacheRule(0.49, 1, 6)) == [2, 4, 5]
    assert reused(EasyCacheRule(0.25, 1, 6)) == [2, 4]
    assert reused(EasyCacheRule(0.05, 1, 6)) == []


def test_steps_outside_of_the_range_are_computed() -> None:
    assert reused(EasyCacheRule(100.0, 1, 6)) == [2, 3, 4, 5]
    # The first step in the range has no rate yet.
    assert reused(EasyCacheRule(100.0, 3, 8)) == [4, 5, 6, 7]
    assert reused(EasyCacheRule(100.0, 0.15 * 8, 0.95 * 8)) == [3, 4, 5, 6, 7]
    assert reused(EasyCacheRule(100.0, 0.15 * 8, 0.85 * 8)) == [3, 4, 5, 6]


def test_input_that_does_not_change_tells_nothing() -> None:
    rule, x = EasyCacheRule(100.0, 0, 8), torch.ones(1)
    for step in range(3):
        assert not rule.reuses(step, x)
        rule.computed(step, x, torch.tensor([float(step)]))


def test_reused_output_is_the_input_plus_the_last_difference() -> None:
    """Outputs are 16 x; the first branch decides for the second one."""
    pipe = ToyPipe()
    method = EasyCache(start=0.25, end=1.0)
    with method.attach(pipe, 100.0, num_inference_steps=4) as handle:
        found = pipe([[1.0, 5.0], [2.0, 50.0], [4.0, 60.0], [5.0, 0.0]])
    # The differences of step 1 are 30 and 750.
    assert found == [[16.0, 80.0], [32.0, 800.0], [34.0, 810.0], [35.0, 750.0]]
    assert handle.stats == BaselineStats("network calls", 4, 4)


def test_only_ends_are_computed_under_a_huge_threshold(any_subject: Subject) -> None:
    with EasyCache().attach(any_subject.pipe, 100.0, num_inference_steps=STEPS) as handle:
        assert not torch.equal(any_subject.generate(), any_subject.full_run)
    # From 15 % on, step 2 gives the rate; 95 % is after the last of eight steps.
    calls = any_subject.branches
    assert handle.stats == BaselineStats("network calls", 3 * calls, 5 * calls)
    assert torch.equal(any_subject.generate(), any_subject.full_run)


def test_nothing_is_reused_under_a_tiny_threshold(subject: Subject) -> None:
    with EasyCache().attach(subject.pipe, 1e-4, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)


def test_more_is_reused_under_a_larger_threshold(flux: Subject) -> None:
    counts = []
    for threshold in (1e-4, 0.3, 100.0):
        with EasyCache().attach(flux.pipe, threshold, num_inference_steps=STEPS) as handle:
            flux.generate()
        counts.append(handle.stats.reused)
    assert counts == sorted(counts)
    assert len(set(counts)) == 3


@pytest.mark.parametrize("steps", [30, 50])
def test_largest_saving_is_that_of_the_range(steps: int) -> None:
    rule = EasyCacheRule(1e9, 0.15 * steps, 0.95 * steps)
    computed = 0
    for step in range(steps):
        x = torch.tensor([float(step)])
        if not rule.reuses(step, x):
            rule.computed(step, x, x + 1)
            computed += 1
    assert computed == {30: 7, 50: 11}[steps]
