"""The style of all figures: colours, lines and markers, labels, and how figures are written.

The series differ in lightness as well as in hue, so that a figure reads in grey print and by the
colour-blind; lines and markers differ too. Text is never in the colour of a series: it stands in
ink beside its line. matplotlib is imported when the first figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any

__all__ = [
    "PALETTE",
    "SERIES",
    "Label",
    "Series",
    "draw_frontier",
    "label_lines",
    "new_figure",
    "spread",
    "styled",
    "to_png",
    "to_svg",
    "with_variables",
]

PALETTE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ink": ("#1b1d20", "#e9ebee"),
        "muted": ("#5c6066", "#a9aeb6"),
        "faint": ("#bcbfc4", "#565c66"),
        "grid": ("#e3e5e8", "#2b3038"),
        "paper": ("#ffffff", "#15181d"),
        "series-0": ("#0b2a6f", "#f4f7ff"),
        "series-1": ("#a3261a", "#d9534a"),
        "series-2": ("#1f78b4", "#4aa3df"),
        "series-3": ("#d07a00", "#f0b429"),
    }
)
"""Every colour, on a white and on a dark page."""

INK, MUTED, FAINT, GRID, PAPER = (
    PALETTE[name][0] for name in ("ink", "muted", "faint", "grid", "paper")
)


@dataclass(frozen=True)
class Series:
    """How the points and the line of one series are drawn.

    Attributes:
        color: as a hexadecimal number.
        line: style of the line, as matplotlib has it.
        marker: of the points, as matplotlib has it.
        width: of the line, in points.
        filled: whether the marker is.
    """

    color: str
    line: str = "-"
    marker: str = "o"
    width: float = 1.6
    filled: bool = True

    def options(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of ``Axes.plot`` and ``Axes.errorbar``."""
        face = self.color if self.filled else PAPER
        drawn = {"color": self.color, "linestyle": self.line, "linewidth": self.width}
        return {**drawn, "marker": self.marker, "markerfacecolor": face, "markersize": 5, **more}


SERIES = (
    Series(PALETTE["series-0"][0], "-", "o", 2.6),
    Series(PALETTE["series-1"][0], "-", "s"),
    Series(PALETTE["series-2"][0], "-", "D"),
    Series(PALETTE["series-3"][0], "-", "^"),
)
"""The series of a figure, the most important first."""

REFERENCE = Series(MUTED, "--", "o", 1.4, filled=False)
"""What every series is compared with, such as runs of fewer steps."""

BACKGROUND = Series(FAINT, "-", "o", 0.9)
"""A series that is there for completeness."""

MAX_SPEEDUP = 8.0  # of a frontier

_SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "errorbar.capsize": 2,
    "svg.fonttype": "none",  # text stays text
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures that are drawn inside have the style; also as a decorator, ``@styled()``."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float, *, constrained: bool = True) -> Any:
    """An empty matplotlib figure of so many inches; ``constrained`` fits axes into it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained" if constrained else None)


def to_png(figure: Any, *, dpi: int = 150) -> bytes:
    """A figure as PNG, the same bytes for the same numbers."""
    data = io.BytesIO()
    with styled():
        figure.savefig(data, format="png", dpi=dpi, metadata={"Software": None})
    return data.getvalue()


def to_svg(figure: Any, *, name: str) -> str:
    """A figure as an SVG element, the same for the same numbers; ``name`` is one of a page."""
    import matplotlib as mpl

    text = io.StringIO()
    with styled(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def with_variables(svg: str) -> str:
    """The same with CSS variables as its colours, named as in `PALETTE`.

    Example:
        >>> with_variables('<path style="fill: #1b1d20"/>')
        '<path style="fill: var(--ink)"/>'
    """
    for variable, (color, _) in PALETTE.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Places of labels: as near as possible to the wanted ones, in their order, ``gap`` apart.

    The sum of squared distances is least, by isotonic regression: labels that are too close are
    pooled, and a pool stands around its mean.

    Args:
        wanted: ascending places.
        gap: least distance of two labels.
        low: the lowest place.
        high: the highest place; if there are too many labels they begin at ``low`` and go beyond.

    Example:
        >>> spread([0.0, 5.0, 5.0], gap=2.0, low=0.0, high=10.0)
        [0.0, 4.0, 6.0]
    """
    pools: list[list[float]] = []
    for place, value in enumerate(wanted):
        pools.append([value - place * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    highest = max(low, high - (len(wanted) - 1) * gap)
    found = [min(max(_mean(pool), low), highest) for pool in pools for _ in pool]
    return [value + place * gap for place, value in enumerate(found)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Label:
    """The name of a line, and where the line ends.

    Attributes:
        text: the name.
        x: where the line ends.
        y: where the line ends.
        series: how the line is drawn.
        bold: whether the name stands out.
    """

    text: str
    x: float
    y: float
    series: Series
    bold: bool = False


def label_lines(axis: Any, labels: Sequence[Label], *, size: float = 7.0) -> list[Any]:
    """Names of lines in a column at the right of an axis, each connected with its line.

    The limits of the axis must be set, and stay.

    Returns:
        The annotation of every label, in their order.
    """
    height = axis.get_figure().get_figheight() * axis.get_position().height * 72  # points
    low, high = axis.get_ylim()
    order = sorted(range(len(labels)), key=lambda k: labels[k].y)
    wanted = [(labels[k].y - low) / (high - low) for k in order]
    places = spread(wanted, gap=1.22 * size / height, low=0.0, high=1.0)
    found: dict[int, Any] = {}
    for k, place in zip(order, places, strict=True):
        label = labels[k]
        found[k] = axis.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=(1.03, place),
            textcoords="axes fraction",
            fontsize=size + 0.5 * label.bold,
            fontweight="bold" if label.bold else "normal",
            color=INK if label.bold else MUTED,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.series.color,
                "linewidth": 0.8 if label.bold else 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )
    return [found[k] for k in range(len(labels))]


Points = Sequence[tuple[float, float]]


@styled()
def draw_frontier(predicted: Points, measured: Mapping[str, Points]) -> Any:
    """What a policy reaches: PSNR against speed-up, predicted as a line, measured as points.

    Identical results, and speed-ups above ``MAX_SPEEDUP``, are left out.

    Args:
        predicted: speed-up and PSNR in dB.
        measured: the same of every method that was measured, ours first.

    Returns:
        A matplotlib figure.
    """
    figure = new_figure(7, 4)
    axis = figure.subplots()
    if predicted:
        line = SERIES[0].options(marker="", label="policy, predicted")
        axis.plot(*_columns(predicted), **line)
    for (name, points), series in zip(measured.items(), SERIES, strict=False):
        if points:
            mark = series.options(linestyle="", markersize=7, label=f"{name}, measured")
            axis.plot(*_columns(points), **mark)
    axis.set_xlabel("times fewer network evaluations")
    axis.set_ylabel("PSNR to the full run [dB]")
    axis.legend()
    return figure


def _columns(points: Points) -> tuple[list[float], list[float]]:
    shown = sorted((x, y) for x, y in points if 1 < x <= MAX_SPEEDUP and isfinite(y))
    return [x for x, _ in shown], [y for _, y in shown]
