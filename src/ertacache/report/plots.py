"""The Pareto plot of benchmark rows: PSNR against speed-up, one line per method.

Ours, the strongest baselines and fewer steps are in colour with their intervals, all others in
grey. Every line has its name at its end, and the marker of its family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ertacache.bench.methods import FAMILIES, PARTS
from ertacache.bench.results import FULL, SAME_MEAN, SAME_TENTH, TRAJECTORY, BenchRow
from ertacache.figures import (
    BACKGROUND,
    MUTED,
    REFERENCE,
    SERIES,
    Label,
    Series,
    label_lines,
    new_figure,
    styled,
    to_svg,
)

__all__ = ["FEWER", "Line", "draw_pareto", "highlights", "lines_of", "pareto", "speedup_of"]

FEWER = "fewer steps"
MARKERS = dict(zip(dict.fromkeys(FAMILIES.values()), "o^XsD", strict=True))
OTHER = "P"  # of a method that is in no family
TICKS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
NEAR_THE_LABELS = 0.55  # share of the width after which a line may be named at the right


@dataclass(frozen=True)
class Line:
    """One method in the plot.

    Attributes:
        method: its name.
        rows: those with numbers, by speed-up.
        series: how it is drawn.
        highlighted: whether it stands out.
    """

    method: str
    rows: tuple[BenchRow, ...]
    series: Series
    highlighted: bool

    def points(self) -> list[tuple[float, float]]:
        """Speed-up and PSNR of every row."""
        return [(speedup_of(row), row.psnr.value) for row in self.rows if row.psnr is not None]


def speedup_of(row: BenchRow) -> float:
    """FLOPs of the full run over those of the method."""
    return 1 / (row.flops_ratio or 1.0)


def highlights(rows: Sequence[BenchRow]) -> list[str]:
    """The methods that stand out: ours, the three strongest baselines, fewer steps.

    A baseline is stronger the larger its PSNR is, summed over the budgets that it reaches. Parts of
    a method are no baselines.
    """
    ran = [row for row in rows if row.psnr is not None and row.method != FULL]
    others = {TRAJECTORY, FEWER, *PARTS}
    total: dict[str, float] = {}
    for row in ran:
        if row.method not in others and row.psnr and row.keeps_budget:
            total[row.method] = total.get(row.method, 0.0) + row.psnr.value
    strongest = sorted(total, key=lambda name: -total[name])[: len(SERIES) - 1]
    there = {row.method for row in ran}
    return [name for name in (TRAJECTORY, *strongest, FEWER) if name in there]


def lines_of(rows: Sequence[BenchRow]) -> list[Line]:
    """What the plot shows, in the order of the rows; methods that did not run have no line."""
    ran: dict[str, list[BenchRow]] = {}
    for row in rows:
        if row.psnr is not None and row.method != FULL:
            ran.setdefault(row.method, []).append(row)
    chosen = highlights(rows)
    colours = iter(SERIES if TRAJECTORY in chosen else SERIES[1:])
    series = {name: REFERENCE if name == FEWER else next(colours) for name in chosen}
    return [
        Line(
            method,
            tuple(sorted(found, key=speedup_of)),
            replace(
                series.get(method, BACKGROUND), marker=MARKERS.get(FAMILIES.get(method, ""), OTHER)
            ),
            method in chosen,
        )
        for method, found in ran.items()
    ]


@styled()
def draw_pareto(rows: Sequence[BenchRow]) -> Any:
    """PSNR to the full run against speed-up, counted in the network's FLOPs.

    Returns:
        A matplotlib figure. The artists of line ``k`` of `lines_of` have the group identifier
        ``line-k``, its name ``label-k``.
    """
    lines = lines_of(rows)
    figure = new_figure(8.2, 5.2, constrained=False)  # names are placed by the size of the axis
    axis = figure.subplots()
    figure.subplots_adjust(left=0.075, right=0.745, top=0.975, bottom=0.14)
    for place, line in enumerate(lines):
        _draw(axis, line, place)
    _set_axes(axis, lines)
    _name(axis, lines)
    _explain(axis, lines)
    return figure


def pareto(rows: Sequence[BenchRow], *, name: str = "pareto") -> str:
    """The plot of `draw_pareto` as an SVG element; ``name`` is one of a page."""
    return to_svg(draw_pareto(rows), name=name)


def _draw(axis: Any, line: Line, place: int) -> None:
    x, y = zip(*line.points(), strict=True)
    small = {} if line.highlighted else {"markersize": 3.5}
    options = line.series.options(gid=f"line-{place}", **small)
    axis.plot(x, y, zorder=3 if line.highlighted else 2, **options)
    if line.highlighted:
        ends = [row.psnr for row in line.rows if row.psnr is not None]
        low, high = [end.low for end in ends], [end.high for end in ends]
        axis.vlines(x, low, high, color=line.series.color, linewidth=1, gid=f"bars-{place}")


def _set_axes(axis: Any, lines: Sequence[Line]) -> None:
    x = [point[0] for line in lines for point in line.points()] or [1.0, 2.0]
    y = [point[1] for line in lines for point in line.points()] or [30.0, 60.0]
    margin = 0.04 * (max(y) - min(y)) + 0.5
    axis.set_xscale("log")
    axis.set_xlim(min(x) / 1.06, max(x) * 1.06)
    axis.set_ylim(min(y) - margin, max(y) + margin)
    ticks = [tick for tick in TICKS if min(x) / 1.06 <= tick <= max(x) * 1.06]
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("speed-up: FLOPs of the full run over those of the method")
    axis.set_ylabel("PSNR to the full run [dB]")
    if min(y) < SAME_MEAN < max(y):
        axis.axhline(SAME_MEAN, color=MUTED, linewidth=0.8, linestyle=":", zorder=1)
        note = f"looks the same: {SAME_MEAN:g} dB on average, {SAME_TENTH:g} dB for 9 of 10"
        _write(axis, note, (axis.get_xlim()[1], SAME_MEAN), (-3, 3)).set_horizontalalignment(
            "right"
        )


def _name(axis: Any, lines: Sequence[Line]) -> None:
    """Name every line: at the right, or beside its end if that is far from there."""
    right: list[tuple[int, Label]] = []
    for place, line in enumerate(lines):
        x, y = line.points()[-1]
        share = axis.transAxes.inverted().transform(axis.transData.transform((x, y)))[0]
        if share >= NEAR_THE_LABELS:
            right.append((place, Label(line.method, x, y, line.series, line.highlighted)))
            continue
        _write(axis, line.method, (x, y), (5, -2)).set_gid(f"label-{place}")
    for (place, _), name in zip(
        right, label_lines(axis, [label for _, label in right]), strict=True
    ):
        name.set_gid(f"label-{place}")
        name.arrow_patch.set_gid(f"leader-{place}")


def _write(axis: Any, text: str, point: tuple[float, float], offset: tuple[float, float]) -> Any:
    """A note beside a point."""
    place = {"xytext": offset, "textcoords": "offset points"}
    return axis.annotate(text, point, **place, fontsize=7, color=MUTED)


def _explain(axis: Any, lines: Sequence[Line]) -> None:
    """The marker of every family that is there."""
    from matplotlib.lines import Line2D

    there = {FAMILIES.get(line.method) for line in lines}
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=MUTED, markersize=5, label=family)
        for family, marker in MARKERS.items()
        if family in there
    ]
    if handles:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": len(handles)}
        axis.legend(handles=handles, **place, columnspacing=1.2, handletextpad=0.1, fontsize=7.5)
