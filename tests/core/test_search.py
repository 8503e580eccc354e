from __future__ import annotations

from itertools import combinations

import pytest
import torch

from ertacache.core import search
from ertacache.core.search import search_schedules, spread_schedule
from ertacache.core.solve import Fit, System, schedule_mask
from tests.core.conftest import Bench, bench


def system_of(flow: Bench) -> System:
    return System(flow.statistics.inner.mean(0, keepdim=True), flow.nominal, Fit())


def error_of(system: System, schedules: list[tuple[int, ...]]) -> torch.Tensor:
    mask = schedule_mask(schedules, system.num_steps)
    return system.simulate(mask, torch.zeros(len(mask), dtype=torch.long)).errors[:, -1]


def test_candidates_simulated_from_their_branch_equal_those_from_the_start(mild: Bench) -> None:
    system = system_of(mild)
    mask = schedule_mask([(0, 5, 12, 20, 28), (0, 1, 2, 3, 4)], 30)
    keep = torch.zeros(30, dtype=torch.bool)
    keep[0] = True
    for candidates in (search._moves(mask, keep), search._borrow_steps(mask, keep)):
        found = search._simulate_variants(system, mask, candidates)
        zeros = torch.zeros(len(candidates.mask), dtype=torch.long)
        whole = system.simulate(candidates.mask, zeros).errors[:, -1]
        assert torch.allclose(found, whole, atol=1e-12)


def test_every_move_is_there_once(mild: Bench) -> None:
    mask = schedule_mask([(0, 2, 3)], 6)
    keep = torch.zeros(6, dtype=torch.bool)
    keep[0] = True
    moved = search._moves(mask, keep).mask
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


def test_pinned_steps_stay(mild: Bench) -> None:
    for schedule in search_schedules(system_of(mild), [4, 5, 9], pinned=[1, 17]):
        assert {0, 1, 17} <= set(schedule)


def test_a_schedule_moves_as_little_as_needed() -> None:
    assert spread_schedule(10, 4, {0, 5}) == (0, 3, 5, 9)
    assert spread_schedule(10, 2, {0, 5}) == (0, 5)
    with pytest.raises(ValueError, match="budget"):
        spread_schedule(10, 11, {0})
