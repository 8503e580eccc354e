"""The search over compute schedules, and schedules of other sigmas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ertacache.core import search as module
from ertacache.core.flows import shifted_sigmas
from ertacache.core.plans import check_compute_steps
from ertacache.core.search import map_schedule, search_schedules, spread_schedule
from ertacache.core.simulate import Fit, System, schedule_mask
from tests.core.rings import Bench, bench


def system_of(flow: Bench) -> System:
    return System(flow.gram.mean(), flow.nominal, Fit())


def error_of(system: System, schedules: list[tuple[int, ...]]) -> torch.Tensor:
    mask = schedule_mask(schedules, system.num_steps)
    return system.simulate(mask, torch.zeros(len(mask), dtype=torch.long)).errors[:, -1]


@pytest.mark.parametrize("few", [0, 10_000])
def test_candidates_simulated_from_their_branch_equal_those_from_the_start(
    mild: Bench, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW", few)  # so few are simulated from the start after all
    system = system_of(mild)
    mask = schedule_mask([(0, 5, 12, 20, 28), (0, 1, 2, 3, 4)], 30)
    keep = torch.zeros(30, dtype=torch.bool)
    keep[0] = True
    for candidates in (module._moves(mask, keep, 2), module._borrow_steps(mask, keep)):
        found = module._simulate_variants(system, mask, candidates)
        zeros = torch.zeros(len(candidates.mask), dtype=torch.long)
        whole = system.simulate(candidates.mask, zeros).errors[:, -1]
        assert torch.allclose(found, whole, atol=1e-12)


def test_every_move_is_there_once(mild: Bench) -> None:
    mask = schedule_mask([(0, 2, 3)], 6)
    keep = torch.zeros(6, dtype=torch.bool)
    keep[0] = True
    moved = module._moves(mask, keep, 2).mask
    found = {tuple(row.nonzero()[:, 0].tolist()) for row in moved}
    assert found == {(0, 1, 3), (0, 3, 4), (0, 1, 2), (0, 2, 4), (0, 2, 5)}
    assert len(moved) == len(found)


def test_small_problems_are_solved_as_well_as_by_trying_everything() -> None:
    flow = bench(2.0, 0.3, 10)
    system = system_of(flow)
    budgets = [3, 4, 5]
    found = search_schedules(system, budgets)
    for budget, schedule in zip(budgets, found, strict=True):
        every = [(0, *rest) for rest in combinations(range(1, 10), budget - 1)]
        best = error_of(system, every).min().item()
        assert error_of(system, [schedule]).item() <= 1.1 * best


def test_never_worse_than_the_uniform_schedule_or_a_given_start(mild: Bench) -> None:
    system = system_of(mild)
    budgets = list(range(2, 31))
    start = (0, 8, 10, 13, 16, 19, 22, 25, 27, 29)
    found = search_schedules(system, budgets, starts=[start])
    uniform = [spread_schedule(30, n, {0}) for n in budgets]
    assert [len(schedule) for schedule in found] == budgets
    assert bool((error_of(system, found) <= error_of(system, uniform) + 1e-9).all())
    assert error_of(system, [found[8]]) <= error_of(system, [start]) + 1e-9
    assert error_of(system, [found[8]]) < 0.8 * error_of(system, [uniform[8]])


def test_the_search_keeps_pinned_steps(mild: Bench) -> None:
    for schedule in search_schedules(system_of(mild), [4, 5, 9], pinned=[1, 17]):
        assert {0, 1, 17} <= set(schedule)


def test_a_schedule_moves_as_little_as_needed() -> None:
    assert spread_schedule(10, 4, {0, 5}) == (0, 3, 5, 9)
    assert spread_schedule(10, 2, {0, 5}) == (0, 5)
    with pytest.raises(ValueError, match="budget"):
        spread_schedule(10, 11, {0})


def test_a_search_of_no_rounds_is_the_better_of_its_starts(mild: Bench) -> None:
    system, worse = system_of(mild), tuple(range(10))
    (start,) = search_schedules(system, [10])
    assert search_schedules(system, [10], starts=[start, worse], rounds=0) == [start]
    uniform = spread_schedule(30, 10, {0})
    assert search_schedules(system, [10], starts=[worse], rounds=0) == [uniform]


LINEAR = torch.linspace(1, 0, 11, dtype=torch.float64)


@pytest.mark.parametrize(
    ("steps", "onto", "budget", "pinned", "expected"),
    [
        ((0, 2, 4, 7), LINEAR, 4, (), (0, 2, 4, 7)),
        ((0, 2, 4, 7), torch.linspace(1, 0, 21), 4, (), (0, 4, 8, 14)),
        ((0, 2, 4, 7), torch.linspace(1, 0, 21), 5, (), (0, 4, 8, 11, 14)),  # of equal gaps
        ((0, 2, 4, 7), LINEAR, 4, (5,), (0, 2, 5, 7)),  # 4 has the nearest neighbours
        ((0, 2, 4, 7), LINEAR[3:], 3, (), (0, 1, 4)),  # 0 and 2 are before its begin
        ((0, 9), LINEAR[5:], 2, (), (0, 4)),
        ((0, 1, 2), torch.linspace(1, 0, 3), 2, (), (0, 1)),  # three levels, two steps
    ],
)
def test_schedules_at_the_same_noise_levels(
    steps: Sequence[int], onto: Tensor, budget: int, pinned: Sequence[int], expected: Sequence[int]
) -> None:
    assert map_schedule(steps, LINEAR, onto.double(), budget=budget, pinned=pinned) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_every_mapped_schedule_can_be_run(data: st.DataObject) -> None:
    T = data.draw(st.integers(1, 25))
    first = data.draw(st.integers(0, T - 1))
    onto = shifted_sigmas(T, data.draw(st.sampled_from([0.5, 1.0, 3.0, 8.0])))[first:]
    steps = (0, *sorted(data.draw(st.sets(st.integers(1, 9)))))
    pinned = data.draw(st.sets(st.integers(0, T - first - 1), max_size=3))
    budget = data.draw(st.integers(len({0, *pinned}), T - first))
    found = map_schedule(steps, LINEAR, onto, budget=budget, pinned=pinned)
    assert check_compute_steps(found, T - first) == found
    assert len(found) == budget
    assert pinned <= set(found)
