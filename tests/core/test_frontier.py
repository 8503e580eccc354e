"""The search over compute schedules, and the best plan for every number of computed steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ertacache.core import search as module
from ertacache.core.flows import shifted_sigmas
from ertacache.core.frontier import (
    PLAIN,
    Frontier,
    MeasuredFit,
    choose_fits,
    leave_out_errors,
    solve_frontier,
)
from ertacache.core.gram import Gram, profile_run
from ertacache.core.plans import check_compute_steps
from ertacache.core.sampler import run_reference
from ertacache.core.search import map_schedule, search_schedules, spread_schedule
from ertacache.core.simulate import Fit, System, fit_plans, schedule_mask
from tests.core.rings import Bench, bench, plain_plan, predicted_errors, solved_third
from tests.core.solvers import euler_update


@pytest.fixture(scope="module")
def frontier(mild: Bench) -> Frontier:
    return solve_frontier(mild.gram, mild.nominal)


@pytest.mark.parametrize(("radius", "width"), [(2.0, 0.3), (4.0, 0.1)])
@pytest.mark.parametrize("num_steps", [30, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_from_the_profile_alone_never_above_plain_reuse(
    radius: float, width: float, num_steps: int, shift: float
) -> None:
    flow, found = solved_third(radius, width, num_steps, shift)
    uniform = spread_schedule(num_steps, num_steps // 3, {0})
    assert flow.error(found.plan) < flow.error(plain_plan(flow.sigmas, uniform))


def test_there_is_a_point_for_every_budget(frontier: Frontier) -> None:
    assert [point.computed for point in frontier.points] == list(range(2, 31))
    assert frontier.points[-1].predicted_error < 1e-6
    errors = [point.predicted_error for point in frontier.points]
    assert errors[0] > 10 * errors[8] > 100 * errors[-1]


def test_the_predicted_error_is_of_the_size_of_the_measured_one(
    mild: Bench, frontier: Frontier
) -> None:
    for point in frontier.points[4:20:3]:
        assert 0.3 < mild.error(point.plan) / point.predicted_error < 3


def test_a_point_by_its_number_of_steps(frontier: Frontier) -> None:
    assert frontier.point(7).computed == 7
    with pytest.raises(ValueError, match="no plan with 31 computed steps: the frontier has 2 to 3"):
        frontier.point(31)


def test_pinned_steps_and_budgets(mild: Bench) -> None:
    found = solve_frontier(mild.gram, mild.nominal, budgets=[4, 8], pinned=[11])
    assert [point.computed for point in found.points] == [4, 8]
    assert all(11 in point.plan.compute_steps for point in found.points)
    with pytest.raises(ValueError, match="budgets must lie between 2 and 30"):
        solve_frontier(mild.gram, mild.nominal, budgets=[1, 4], pinned=[11])


def wandering_profile(prompts: int) -> tuple[Gram, Tensor]:
    """Outputs that are random walks: the last one predicts best, whatever a fit finds."""
    generator = torch.Generator().manual_seed(0)
    sigmas = shifted_sigmas(10)
    walk = torch.randn(11, prompts, 2, generator=generator, dtype=torch.float64).cumsum(0)
    steps = iter(range(10))
    full = run_reference(lambda x, sigma: walk[next(steps)], walk[10], sigmas=sigmas)
    return profile_run(full).gram, euler_update(sigmas)


def test_with_few_uninformative_prompts_it_falls_back_towards_plain_reuse() -> None:
    gram, nominal = wandering_profile(2)
    schedule = spread_schedule(10, 4, {0})
    errors = [
        leave_out_errors(gram, nominal, schedules=[schedule], fit=Fit(ridge=ridge)).item()
        for ridge in (1e-3, PLAIN)
    ]
    found = solve_frontier(gram, nominal, budgets=[4]).points[0]
    assert errors[1] < errors[0]
    assert found.fit.ridge >= 0.1
    assert found.predicted_error <= errors[1]


def test_errors_never_rise_with_the_number_of_computed_steps(mild: Bench) -> None:
    """Also where what was measured would let them: 9 steps ten times worse than 8."""
    fits = (MeasuredFit(8, Fit(), 1.0), MeasuredFit(9, Fit(), 10.0))
    budgets = [7, 8, 9, 20]
    points = solve_frontier(mild.gram, mild.nominal, budgets=budgets, measured=fits).points
    schedules = [point.plan.compute_steps for point in points]
    own = leave_out_errors(mild.gram, mild.nominal, schedules=schedules, fit=Fit()).tolist()
    assert own[0] > own[1] > own[2] > own[1] / 10
    expected = [own[0], own[1], own[1], 10 * own[3]]
    assert [point.predicted_error for point in points] == pytest.approx(expected, rel=1e-6)


MEASURED = (MeasuredFit(4, Fit(ridge=0.1), 2.0), MeasuredFit(16, Fit(history=2), 0.5, uniform=True))


def test_measured_fits_in_between_and_beyond() -> None:
    """Ratios are geometric in the number of computed steps: 2 at 4, 1 at 8, 1/2 at 16."""
    found = choose_fits(MEASURED, [2, 4, 7, 9, 16, 40])
    assert [each.computed for each in found] == [2, 4, 7, 9, 16, 40]
    assert [each.uniform for each in found] == [False] * 3 + [True] * 3
    assert [each.fit for each in found] == [MEASURED[0].fit] * 3 + [MEASURED[1].fit] * 3
    ratios = [each.error_ratio for each in found]
    assert ratios == pytest.approx([2.0, 2.0, 8 / 7, 8 / 9, 0.5, 0.5])
    assert [each.error_ratio for each in choose_fits(MEASURED[:1], [1, 9])] == [2.0, 2.0]


def test_budgets_are_fitted_as_was_measured(mild: Bench) -> None:
    budgets = [5, 7, 12, 20]
    points = solve_frontier(mild.gram, mild.nominal, budgets=budgets, measured=MEASURED).points
    bound = math.inf
    for point, known in zip(points, choose_fits(MEASURED, budgets), strict=True):
        assert point.fit == known.fit
        assert point.plan.history == known.fit.history
        schedules = [point.plan.compute_steps]
        if known.uniform:
            assert schedules == [spread_schedule(30, known.computed, {0})]
        error = leave_out_errors(mild.gram, mild.nominal, schedules=schedules, fit=point.fit)
        bound = min(bound, known.error_ratio * error.item())
        assert point.predicted_error == pytest.approx(bound, rel=1e-6)
        (plan,) = fit_plans(mild.gram, mild.nominal, schedules=schedules, fit=point.fit)
        torch.testing.assert_close(plan.coefficients, point.plan.coefficients)


def test_what_was_measured_has_a_range() -> None:
    with pytest.raises(ValueError, match="computed must be positive, got 0"):
        MeasuredFit(0, Fit(), 1.0)
    for ratio in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="error_ratio must be positive"):
            MeasuredFit(2, Fit(), ratio)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_runs(num_steps: int) -> None:
    flow = bench(2.0, 0.3, num_steps)
    budgets = list(range(1, num_steps + 1))
    points = solve_frontier(flow.gram, flow.nominal, budgets=budgets).points
    assert [point.computed for point in points] == budgets
    assert flow.error(points[-1].plan) < 1e-6


def test_left_out_prompts_are_left_out(mild: Bench) -> None:
    """With two prompts the error is that of each under the plan of the other."""
    pair, one, two = (mild.statistics.select(some).gram for some in ([0, 1], [0], [1]))
    schedule, fit = spread_schedule(30, 8, {0}), Fit(ridge=1e-3)
    expected = 0.0
    for fitted, evaluated in ((one, two), (two, one)):
        (plan,) = fit_plans(fitted, mild.nominal, schedules=[schedule], fit=fit)
        expected += predicted_errors(evaluated, mild.nominal, plan=plan)[0, -1].item() ** 2 / 2
    found = leave_out_errors(pair, mild.nominal, schedules=[schedule], fit=fit)
    assert found.item() == pytest.approx(expected**0.5, rel=1e-6)


def test_a_single_prompt_is_enough_for_a_plan(mild: Bench) -> None:
    point = solve_frontier(mild.statistics.select([0]).gram, mild.nominal, budgets=[10]).points[0]
    assert point.fit.ridge == 1e-2
    assert mild.error(point.plan) < mild.error(
        plain_plan(mild.sigmas, spread_schedule(30, 10, {0}))
    )


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
