from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import shifted_sigmas
from ertacache.core.frontier import Frontier, leave_out_errors, solve_frontier
from ertacache.core.gram import RunStatistics, profile_run
from ertacache.core.sampler import plain_plan
from ertacache.core.search import spread_schedule
from ertacache.core.solve import Fit, fit_plans, predict_errors
from ertacache.core.solver import run_reference
from tests.core.conftest import Bench, bench


@pytest.fixture(scope="module")
def frontier(mild: Bench) -> Frontier:
    return solve_frontier(mild.statistics, mild.nominal)


@pytest.mark.parametrize(("radius", "width"), [(2.0, 0.3), (4.0, 0.1)])
@pytest.mark.parametrize("num_steps", [30, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_from_the_profile_alone_never_above_plain_reuse(
    radius: float, width: float, num_steps: int, shift: float
) -> None:
    flow = bench(radius, width, num_steps, shift)
    budget = num_steps // 3
    plain = flow.error(plain_plan(flow.sigmas, spread_schedule(num_steps, budget, {0})))
    found = solve_frontier(flow.statistics, flow.nominal, budgets=[budget]).points[0]
    assert flow.error(found.plan) < plain


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


def test_a_wish_selects_a_point(frontier: Frontier) -> None:
    assert frontier.select(compute_steps=7).computed == 7
    assert frontier.select(speedup=2.0).computed == 15
    assert frontier.select(speedup=2.8).computed == 10  # at least 2.8 times: not 11
    limit = frontier.points[6].predicted_error
    assert frontier.select(max_error=limit).computed <= frontier.points[6].computed


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({}, "exactly one"),
        ({"speedup": 2.0, "compute_steps": 4}, "exactly one"),
        ({"speedup": 0.5}, "speedup must be between 1 and 30"),
        ({"compute_steps": 31}, "no plan with 31 computed steps: the frontier has 2 to 30"),
        ({"max_error": -1.0}, "no plan is expected to stay within -1"),
    ],
)
def test_a_wish_that_cannot_be_met_says_so(
    frontier: Frontier, wish: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        frontier.select(**wish)  # type: ignore[arg-type]


def test_pinned_steps_and_budgets(mild: Bench) -> None:
    found = solve_frontier(mild.statistics, mild.nominal, budgets=[4, 8], pinned=[11])
    assert [point.computed for point in found.points] == [4, 8]
    assert all(11 in point.plan.compute_steps for point in found.points)
    with pytest.raises(ValueError, match="budgets must lie between 2 and 30"):
        solve_frontier(mild.statistics, mild.nominal, budgets=[1, 4], pinned=[11])


def wandering_profile(prompts: int) -> tuple[RunStatistics, Tensor]:
    """Outputs that wander at random: the last one is the best guess, whatever a fit believes."""
    generator = torch.Generator().manual_seed(0)
    sigmas = shifted_sigmas(10)
    walk = torch.randn(11, prompts, 2, generator=generator, dtype=torch.float64).cumsum(0)
    steps = iter(range(10))
    run = run_reference(lambda x, sigma: walk[next(steps)], walk[10], sigmas=sigmas)
    d = sigmas.diff()
    return profile_run(run), torch.stack([torch.ones_like(d), d], dim=1)


def test_with_few_prompts_that_teach_nothing_it_falls_back_towards_plain_reuse() -> None:
    statistics, nominal = wandering_profile(2)
    schedule = spread_schedule(10, 4, {0})
    errors = [
        leave_out_errors(
            statistics, nominal, schedules=[schedule], fit=Fit(ridge=ridge, sensitivity=0.0)
        ).item()
        for ridge in (1e-3, 1e6)
    ]
    found = solve_frontier(
        statistics, nominal, budgets=[4], fit=Fit(sensitivity=0.0), starts=[schedule]
    ).points[0]
    assert errors[1] < errors[0]
    assert found.fit.ridge >= 0.1
    assert found.predicted_error <= errors[1]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_runs(num_steps: int) -> None:
    flow = bench(2.0, 0.3, num_steps)
    budgets = list(range(1, num_steps + 1))
    points = solve_frontier(flow.statistics, flow.nominal, budgets=budgets).points
    assert [point.computed for point in points] == budgets
    assert flow.error(points[-1].plan) < 1e-6


def test_left_out_prompts_are_left_out(mild: Bench) -> None:
    """With two prompts the error is that of each under the plan of the other."""
    pair, one, two = (mild.statistics.select(prompts) for prompts in ([0, 1], [0], [1]))
    schedule, fit = spread_schedule(30, 8, {0}), Fit(ridge=1e-3)
    expected = 0.0
    for fitted, judged in ((one, two), (two, one)):
        (plan,) = fit_plans(fitted, mild.nominal, schedules=[schedule], fit=fit)
        expected += predict_errors(judged, mild.nominal, plan=plan)[0, -1].item() ** 2 / 2
    found = leave_out_errors(pair, mild.nominal, schedules=[schedule], fit=fit)
    assert found.item() == pytest.approx(expected**0.5, rel=1e-6)


def test_a_single_prompt_is_enough_for_a_plan(mild: Bench) -> None:
    point = solve_frontier(mild.statistics.select([0]), mild.nominal, budgets=[10]).points[0]
    assert point.fit.ridge == 1e-2
    assert mild.error(point.plan) < mild.error(
        plain_plan(mild.sigmas, spread_schedule(30, 10, {0}))
    )
