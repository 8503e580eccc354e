"""The search of trials and refits, by scripted attempts: ridges, orders and groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ertacache.calibration.trial import RIDGES, Search
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.simulate import Fit

START = 1e-2
FINEST = Groups(channels=4, bands=3)
BANDS, CHANNELS = Groups(bands=3), Groups(channels=4)


class Attempts:
    """Errors from a script, and the fits in the order in which they were tried."""

    def __init__(self, error: Callable[[Fit], float]) -> None:
        self._error = error
        self.tried: list[Fit] = []

    def search(self, **start: Any) -> Search[float]:
        fit = Fit(**{"ridge": START} | start)
        return Search(self, lambda one, other, margin: one * margin < other, fit)

    def __call__(self, fit: Fit) -> float:
        self.tried.append(fit)
        return self._error(fit)


def decibels(db: float) -> float:
    """An error so many decibels below 1."""
    return float(10 ** (-db / 20))


def ridge_valley(best: float) -> Callable[[Fit], float]:
    """Errors that grow by a factor of two with every step away from a ridge."""
    return lambda fit: 2.0 ** abs(round(math.log10(fit.ridge / best)))


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1e-4, [1e-2, 1e-1, 1e-3, 1e-4]),
        (1e-3, [1e-2, 1e-1, 1e-3, 1e-4]),
        (1e-2, [1e-2, 1e-1, 1e-3]),  # a stronger one first, then a weaker one
        (1e-1, [1e-2, 1e-1, 1.0]),
        (1.0, [1e-2, 1e-1, 1.0, 10.0]),
        (10.0, [1e-2, 1e-1, 1.0, 10.0]),
    ],
)
def test_ridges_are_climbed_up_and_down(best: float, tried: list[float]) -> None:
    attempts = Attempts(ridge_valley(best))
    search = attempts.search()
    search.climb_ridges()
    assert (search.fit, search.best) == (Fit(ridge=best), 1.0)
    assert [fit.ridge for fit in attempts.tried] == tried
    assert {replace(fit, ridge=best) for fit in attempts.tried} == {search.fit}


@pytest.mark.parametrize("end", [RIDGES[0], RIDGES[-1]])
def test_a_climb_ends_with_the_ridges(end: float) -> None:
    attempts = Attempts(ridge_valley(end))
    search = attempts.search(ridge=end)
    search.climb_ridges()
    assert search.fit.ridge == end
    assert len(attempts.tried) == 2  # itself and its one neighbour


def test_equal_errors_change_nothing() -> None:
    attempts = Attempts(lambda fit: 1.0)
    search = attempts.search(order=1)
    search.climb_ridges()
    search.try_orders()
    search.try_groups(FINEST)
    assert search.fit == Fit(ridge=START, order=1) == attempts.tried[0]


@pytest.mark.parametrize(("ridge", "strong"), [(1e-3, 1.0), (1.0, 1.0), (10.0, 10.0)])
def test_orders_are_tried_with_a_strong_ridge(ridge: float, strong: float) -> None:
    attempts = Attempts(lambda fit: 1.0 + fit.order)
    search = attempts.search(ridge=ridge)
    search.try_orders()
    assert search.fit == Fit(ridge=ridge)
    assert attempts.tried[1:] == [Fit(ridge=strong, order=1), Fit(ridge=strong, order=2)]


def test_an_order_that_is_better_is_kept_and_its_ridges_are_climbed() -> None:
    """With a strong ridge the first order is better; the best of its ridges is weaker."""
    best = {0: (1e-2, 4.0), 1: (1e-1, 1.0), 2: (1.0, 3.0)}

    def error(fit: Fit) -> float:
        ridge, least = best[fit.order]
        return least * ridge_valley(ridge)(fit)

    attempts = Attempts(error)
    search = attempts.search()
    search.try_orders()
    assert (search.fit, search.best) == (Fit(ridge=1e-1, order=1), 1.0)
    assert [(fit.order, fit.ridge) for fit in attempts.tried[1:]] == [
        (1, 1.0),
        (1, 10.0),
        (1, 1e-1),
        (1, 1e-2),
        (2, 1.0),  # again with a strong one
    ]


def test_the_highest_order_may_be_the_best() -> None:
    attempts = Attempts(lambda fit: ridge_valley(1.0)(fit) / (1 + fit.order))
    search = attempts.search(ridge=1.0, history=3)
    search.try_orders()
    assert search.fit == Fit(ridge=1.0, order=2, history=3)


def divided(gains: dict[Groups, float], *, weaker: float = 0.0) -> Attempts:
    """Decibels that divisions gain, and how many more they gain with a ridge below the start."""

    def error(fit: Fit) -> float:
        more = weaker if fit.groups != ONE_GROUP and fit.ridge < START else 0.0
        return decibels(gains.get(fit.groups, 0.0) + more)

    return Attempts(error)


@pytest.mark.parametrize("gain", [-3.0, 0.0, 0.29])
def test_a_division_must_be_better_by_more_than_a_margin(gain: float) -> None:
    attempts = divided({BANDS: gain, CHANNELS: gain, FINEST: gain})
    search = attempts.search(order=1, history=3)
    search.try_groups(FINEST)
    start = Fit(ridge=START, order=1, history=3)
    assert (search.fit, search.best) == (start, 1.0)
    assert attempts.tried == [
        start,
        *(replace(start, groups=groups) for groups in (BANDS, CHANNELS, FINEST)),  # few at first
    ]


@pytest.mark.parametrize(("more", "ridge"), [(0.1, 1e-3), (0.0, START), (-0.1, START)])
def test_a_division_is_tried_with_a_weaker_ridge(more: float, ridge: float) -> None:
    attempts = divided({FINEST: 0.31}, weaker=more)
    search = attempts.search()
    search.try_groups(FINEST)
    assert search.fit == Fit(ridge=ridge, groups=FINEST)
    assert attempts.tried[-1] == Fit(ridge=1e-3, groups=FINEST)


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        ({BANDS: 4.71, CHANNELS: 5.0, FINEST: 5.0}, BANDS),  # the others are hardly better
        ({BANDS: 4.69, CHANNELS: 5.0, FINEST: 5.29}, CHANNELS),
        ({BANDS: 4.69, CHANNELS: 5.0, FINEST: 5.31}, FINEST),
        ({BANDS: 0.29, CHANNELS: 0.29, FINEST: 0.31}, FINEST),
        ({BANDS: 6.0, CHANNELS: 1.0, FINEST: -3.0}, BANDS),  # many groups may overfit
    ],
)
def test_the_simpler_division_is_kept_within_the_margin(
    gains: dict[Groups, float], kept: Groups
) -> None:
    attempts = divided(gains)
    search = attempts.search()
    search.try_groups(FINEST)
    assert search.fit == Fit(ridge=START, groups=kept)
    assert search.best == pytest.approx(decibels(gains[kept]))


def test_no_division_is_tried_twice() -> None:
    attempts = divided({BANDS: 5.0})
    search = attempts.search(ridge=RIDGES[0])  # there is no weaker one
    search.try_groups(FINEST)
    assert [fit.groups for fit in attempts.tried] == [ONE_GROUP, BANDS, CHANNELS, FINEST]
    attempts = divided({BANDS: 5.0})
    attempts.search().try_groups(BANDS)  # of a latent with one channel
    assert [fit.groups for fit in attempts.tried] == [ONE_GROUP, BANDS, BANDS]
    assert [fit.ridge for fit in attempts.tried] == [START, START, 1e-3]


def test_nothing_to_divide() -> None:
    attempts = divided({})
    for finest in (None, ONE_GROUP):
        attempts.search().try_groups(finest)
    assert attempts.tried == [Fit(ridge=START)] * 2
