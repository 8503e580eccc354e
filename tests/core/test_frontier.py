"""The frontier: the best plan for every number of computed steps."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import shifted_sigmas
from ertacache.core.frontier import (
    PLAIN,
    Frontier,
    MeasuredFit,
    choose_fits,
    leave_out_errors,
    solve_frontier,
)
from ertacache.core.gram import Gram, Trajectory, profile_run
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.sampler import run_reference
from ertacache.core.search import spread_schedule
from ertacache.core.simulate import Fit, fit_plans
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


def test_given_schedules_are_not_searched(mild: Bench) -> None:
    """Fitted as was measured, or with a ridge found by leaving prompts out."""
    given = [(0, 1, 2, 3), (0, 2, 4, 6, 8, 10)]
    for measured in (MEASURED, ()):
        found = solve_frontier(
            mild.gram, mild.nominal, budgets=[4, 6], measured=measured, given=given
        )
        assert [point.plan.compute_steps for point in found.points] == given
        for point in found.points:
            error = leave_out_errors(
                mild.gram,
                mild.nominal,
                schedules=[point.plan.compute_steps],
                fit=point.fit,
                careful=not measured,
            )
            assert point.simulated_error == pytest.approx(error.item(), rel=1e-6)


def test_a_frontier_with_other_ratios_and_another_point(mild: Bench) -> None:
    one = solve_frontier(
        mild.gram, mild.nominal, budgets=[4, 6, 8], measured=[MeasuredFit(4, Fit(), 1.0)]
    )
    (other,) = solve_frontier(
        mild.gram,
        mild.nominal,
        budgets=[6],
        measured=[MeasuredFit(6, Fit(), 1.0)],
        given=[(0, 5, 10, 15, 20, 29)],
    ).points
    ratios = [MeasuredFit(4, Fit(), 4.0), MeasuredFit(8, Fit(), 1.0)]
    found = one.corrected(ratios, [other])
    assert [p.plan for p in found.points] == [one.points[0].plan, other.plan, one.points[2].plan]
    between = choose_fits(ratios, [6])[0].error_ratio
    first, last = one.points[0].simulated_error, one.points[2].simulated_error
    expected = [4 * first, min(4 * first, between * other.simulated_error), last]
    assert [p.predicted_error for p in found.points] == pytest.approx(expected, rel=1e-9)


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


def test_a_prompt_that_diverges_counts_as_one_of_many(mild: Bench) -> None:
    """One of 16 has errors a thousand times as large: the expected ones grow as its logarithm."""
    gram, schedule = mild.gram, spread_schedule(30, 8, {0})
    factors = torch.ones(16, dtype=torch.float64)
    factors[5] = 1e6  # of squares
    worse = Gram(gram.products * factors[:, None, None])
    plain, wild = (
        leave_out_errors(each, mild.nominal, schedules=[schedule], fit=Fit(ridge=PLAIN)).item()
        for each in (gram, worse)
    )
    assert wild / plain == pytest.approx(1e3 ** (1 / 16))


def test_a_careful_error_is_the_root_mean_square_over_prompts(mild: Bench) -> None:
    schedule, fit = spread_schedule(30, 8, {0}), Fit(ridge=PLAIN)
    each = [
        leave_out_errors(Gram(one[None]), mild.nominal, schedules=[schedule], fit=fit).item()
        for one in mild.gram.products
    ]
    for careful, expected in (
        (True, statistics.mean(e**2 for e in each) ** 0.5),
        (False, statistics.geometric_mean(each)),
    ):
        found = leave_out_errors(
            mild.gram, mild.nominal, schedules=[schedule], fit=fit, careful=careful
        )
        assert found.item() == pytest.approx(expected)


def test_many_prompts_are_simulated_as_means(mild: Bench) -> None:
    """Every prompt four times is every prompt once."""
    schedules = [spread_schedule(30, n, {0}) for n in (5, 10)]
    many = Gram(mild.gram.products.repeat(4, 1, 1))
    found = leave_out_errors(many, mild.nominal, schedules=schedules, fit=Fit(ridge=PLAIN))
    once = leave_out_errors(mild.gram, mild.nominal, schedules=schedules, fit=Fit(ridge=PLAIN))
    torch.testing.assert_close(found, once)


def test_left_out_prompts_are_left_out(mild: Bench) -> None:
    """With two prompts the error is that of each under the plan of the other."""
    pair, one, two = (mild.statistics.select(some).gram for some in ([0, 1], [0], [1]))
    schedule, fit = spread_schedule(30, 8, {0}), Fit(ridge=1e-3)
    expected = 1.0
    for fitted, evaluated in ((one, two), (two, one)):
        (plan,) = fit_plans(fitted, mild.nominal, schedules=[schedule], fit=fit)
        expected *= predicted_errors(evaluated, mild.nominal, plan=plan)[0, -1].item()
    found = leave_out_errors(pair, mild.nominal, schedules=[schedule], fit=fit)
    assert found.item() == pytest.approx(expected**0.5, rel=1e-6)


def test_a_single_prompt_is_enough_for_a_plan(mild: Bench) -> None:
    point = solve_frontier(mild.statistics.select([0]).gram, mild.nominal, budgets=[10]).points[0]
    assert point.fit.ridge == 1e-2
    assert mild.error(point.plan) < mild.error(
        plain_plan(mild.sigmas, spread_schedule(30, 10, {0}))
    )


def test_a_fit_with_groups_takes_the_profile_by_group(mild: Bench) -> None:
    """Searched and predicted with one group, fitted with all."""
    groups = Groups(channels=2)
    halves = [part_of(mild, rows) for rows in (slice(0, 32), slice(32, 64))]
    divided = Gram(torch.stack([half / 2 for half in halves]).mean(1), groups=2)
    fits = [MeasuredFit(8, Fit(groups=each), 2.0) for each in (ONE_GROUP, groups)]
    (plain,), (point,) = (
        solve_frontier(
            mild.gram,
            mild.nominal,
            budgets=[8],
            measured=[known],
            by_group=lambda asked: divided if asked == groups else mild.gram,
        ).points
        for known in fits
    )
    assert point.plan.compute_steps == plain.plan.compute_steps
    assert point.predicted_error == plain.predicted_error
    assert point.plan.groups == groups
    schedules = [point.plan.compute_steps]
    (expected,) = fit_plans(divided, mild.nominal, schedules=schedules, fit=point.fit)
    torch.testing.assert_close(point.plan.coefficients, expected.coefficients)
    with pytest.raises(ValueError, match="a fit of 2 channels needs the profile by group"):
        solve_frontier(mild.gram, mild.nominal, budgets=[8], measured=fits[1:])


def part_of(flow: Bench, rows: slice) -> Tensor:
    """Gram matrices of some of the points of every prompt."""
    full = flow.reference
    latents, outputs = (tuple(u[:, rows] for u in us) for us in (full.latents, full.outputs))
    return profile_run(Trajectory(latents, outputs)).gram.products


def test_a_run_with_every_step_computed_has_no_error(frontier: Frontier) -> None:
    assert frontier.points[-1].predicted_error == 0.0
    assert frontier.points[-2].predicted_error > 0.0
