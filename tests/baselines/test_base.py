"""Parameters are checked and searched; a handle undoes once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ertacache.baselines import BaselineHandle, BaselineStats, Parameter, search_parameter

THRESHOLD = Parameter("threshold", 1e-4, 100.0, saves=True)
STEPS = Parameter("computed steps", 1, 30, saves=False, integer=True)


@pytest.mark.parametrize(
    ("parameter", "value", "text"),
    [
        (THRESHOLD, 1e-5, "threshold must be from 0.0001 to 100.0, got 1e-05"),
        (THRESHOLD, float("nan"), "threshold must be from"),
        (STEPS, 31, "computed steps must be from 1 to 30, got 31"),
        (STEPS, 2.5, "computed steps must be a whole number, got 2.5"),
    ],
)
def test_bad_values_are_named(parameter: Parameter, value: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parameter.check(value)


def test_threshold_is_found_across_decades() -> None:
    value, ratio = search_parameter(THRESHOLD, lambda x: 1 / (1 + x / 0.003), 0.5)
    assert value == pytest.approx(0.003, rel=0.1)
    assert ratio == pytest.approx(0.5, rel=0.03)


def test_steps_are_found_exactly() -> None:
    assert search_parameter(STEPS, lambda n: n / 30, 1 / 3) == (10, 10 / 30)


def test_counts_are_found_where_their_cost_is_linear() -> None:
    tried = []

    def ratio(n: float) -> float:
        tried.append(n)
        return n / 30

    search_parameter(STEPS, ratio, 0.5)
    assert tried == [1, 30, 15]


@pytest.mark.parametrize("target", [0.05, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("power", [-1.0, 3.0])
def test_counts_are_found_where_their_cost_is_bent(target: float, power: float) -> None:
    costs = {n: (n if power < 0 else 21 - n) ** power for n in range(1, 21)}
    costs = {n: cost / costs[1] for n, cost in costs.items()}
    parameter = Parameter("interval", 1, 20, saves=True, integer=True)
    _, reached = search_parameter(
        parameter, lambda n: costs[int(n)], target, tolerance=0.0, tries=20
    )
    assert reached == min(costs.values(), key=lambda cost: abs(cost - target))


@pytest.mark.parametrize("target", [0.2, 0.6])
def test_bound_is_the_answer_when_nothing_reaches_the_target(target: float) -> None:
    parameter = Parameter("interval", 1, 10, saves=True, integer=True)
    tried = []

    def ratio(n: float) -> float:
        tried.append(n)
        return 0.9 - 0.01 * n

    assert search_parameter(parameter, ratio, target) == (10, pytest.approx(0.8))
    assert tried == [10]


def test_cliff_ends_the_search_within_the_tries() -> None:
    tried = []

    def ratio(x: float) -> float:
        tried.append(x)
        return 1.0 if x < 0.17 else 0.2

    _, reached = search_parameter(THRESHOLD, ratio, 0.5, tries=9)
    assert reached == 0.2
    assert len(tried) == 9


def test_detach_undoes_once() -> None:
    undone = []
    with ExitStack() as undo:
        undo.callback(undone.append, 1)
        handle = BaselineHandle(undo.pop_all(), lambda: BaselineStats("blocks", 1, 2))
    assert not undone
    with handle as same:
        assert same.stats == BaselineStats("blocks", 1, 2)
    handle.detach()
    assert undone == [1]
