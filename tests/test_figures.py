"""The palette can be told apart by everyone and in print; labels do not overlap; figures repeat."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import dist, inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ertacache.figures import (
    PALETTE,
    SERIES,
    Label,
    draw_frontier,
    label_lines,
    new_figure,
    spread,
    styled,
    to_png,
    to_svg,
)

# What a colour of linear RGB looks like (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "normal": torch.eye(3),
    "deuteranopia": torch.tensor(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": torch.tensor(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "tritanopia": torch.tensor(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = torch.tensor(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
PAGES = {"light": 0, "dark": 1}


def linear(color: str) -> Tensor:
    """Linear RGB of a hexadecimal colour."""
    c = torch.tensor([int(color[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return torch.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: Tensor) -> list[float]:
    """CIELAB with white D65."""
    x, y, z = (XYZ @ rgb.clamp(0, 1) / torch.tensor([0.95047, 1.0, 1.08883])).tolist()
    fx, fy, fz = (
        v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in (x, y, z)
    )
    return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)]


def contrast(a: str, b: str) -> float:
    """Contrast as WCAG defines it."""
    low, high = sorted((XYZ[1] @ linear(color)).item() for color in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_lab_of_known_colours() -> None:
    assert lab(linear("#ffffff")) == pytest.approx([100, 0, 0], abs=0.02)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("sight", SIGHT)
def test_series_can_be_told_apart(page: str, sight: str) -> None:
    """A difference of 2.3 is just noticeable; lines need many times that."""
    names = [*(name for name in PALETTE if name.startswith("series")), "faint"]
    seen = [lab(SIGHT[sight] @ linear(PALETTE[name][PAGES[page]])) for name in names]
    assert min(dist(a, b) for a, b in combinations(seen, 2)) > 20


@pytest.mark.parametrize("page", PAGES)
def test_series_differ_in_grey(page: str) -> None:
    colors = [PALETTE[name][PAGES[page]] for name in PALETTE if name.startswith("series")]
    lightness = sorted(lab(linear(color))[0] for color in colors)
    assert min(b - a for a, b in pairwise(lightness)) > 8


@pytest.mark.parametrize("page", PAGES)
def test_text_and_lines_stand_out_from_the_page(page: str) -> None:
    color = {name: found[PAGES[page]] for name, found in PALETTE.items()}
    assert min(contrast(color[name], color["paper"]) for name in ("ink", "muted")) >= 4.5
    series = [color[name] for name in color if name.startswith("series")]
    assert min(contrast(each, color["paper"]) for each in series) >= 3


def test_series_differ_in_their_markers_too() -> None:
    assert len({series.marker for series in SERIES}) == len(SERIES)


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.001, 0.03))
def test_labels_are_apart_and_inside(wanted: list[float], gap: float) -> None:
    places = spread(sorted(wanted), gap=gap, low=0.0, high=1.0)
    assert all(b - a > gap - 1e-9 for a, b in pairwise(places))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_labels_that_fit_stay_where_they_are() -> None:
    places = spread([0.1, 0.5, 0.9], gap=0.1, low=0.0, high=1.0)
    assert places == pytest.approx([0.1, 0.5, 0.9])
    assert spread([5.0, 5.0], gap=2.0, low=0.0, high=5.0) == [3.0, 5.0]
    assert spread([], gap=1.0, low=0.0, high=1.0) == []


def test_labels_stand_in_the_order_of_the_lines() -> None:
    with styled():
        axis = new_figure(4, 3).subplots()
    names = label_lines(axis, [Label("a", 1, 0.5, SERIES[0]), Label("b", 1, 0.4, SERIES[1])])
    assert [name.get_text() for name in names] == ["a", "b"]
    assert names[0].xyann[1] > names[1].xyann[1]


def test_a_frontier_leaves_out_what_cannot_be_drawn() -> None:
    figure = draw_frontier([(3.0, 40.0), (2.0, 50.0), (1.0, inf), (20.0, 9.0)], {"policy": []})
    (axis,) = figure.axes
    (line,) = axis.lines
    assert line.get_xydata().tolist() == [[2.0, 50.0], [3.0, 40.0]]


def test_figures_are_the_same_twice_and_say_nothing_of_the_machine() -> None:
    def draw() -> object:
        return draw_frontier([(2.0, 50.0), (3.0, 40.0)], {"policy": [(2.0, 51.0)]})

    assert to_png(draw()) == to_png(draw())
    assert to_svg(draw(), name="a") == to_svg(draw(), name="a")
    assert to_svg(draw(), name="a") != to_svg(draw(), name="b")
    assert b"Software" not in to_png(draw())
