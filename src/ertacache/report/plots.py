"""Plots of benchmark rows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ertacache.bench.results import FULL, TRAJECTORY, BenchRow, Interval

__all__ = ["draw_pareto", "pareto"]

_MARKS = "osD^v<>Phd*pX"


def pareto(rows: Sequence[BenchRow]) -> str:
    """The plot of `draw_pareto` as an SVG element."""
    import matplotlib as mpl

    text = io.StringIO()
    # Without a date and with fixed ids the same rows give the same page.
    with mpl.rc_context({"svg.hashsalt": "ertacache", "svg.fonttype": "none"}):
        figure = draw_pareto(rows)
        figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def draw_pareto(rows: Sequence[BenchRow]) -> Any:
    """PSNR to the full run against the share of the network's FLOPs, one line per method.

    Returns:
        A matplotlib figure; the legend has the method with the best mean first.
    """
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, Interval]]] = {}
    for row in rows:
        if row.psnr is not None and row.method != FULL:
            points.setdefault(row.method, []).append((row.flops_ratio or 0.0, row.psnr))
    figure = Figure(figsize=(8, 5))
    axis = figure.subplots()
    for place, method in enumerate(points):
        _draw(axis, method, sorted(points[method], key=lambda point: point[0]), place)
    shares = [share for line in points.values() for share, _ in line] or [0.0, 1.0]
    axis.set_xlim(max(0.0, min(shares) - 0.05), max(shares) + 0.05)
    axis.set_xlabel("FLOPs of the network, share of the full run")
    axis.set_ylabel("PSNR to the full run [dB]")
    axis.grid(alpha=0.3)
    if points:
        lines, names = axis.get_legend_handles_labels()
        heights = [max(psnr.value for _, psnr in points[name]) for name in names]
        order = sorted(range(len(names)), key=lambda k: -heights[k])
        axis.legend(
            [lines[k] for k in order],
            [names[k] for k in order],
            fontsize=8,
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
        )
    return figure


def _draw(axis: Any, method: str, points: Sequence[tuple[float, Interval]], place: int) -> None:
    below = [psnr.value - psnr.low for _, psnr in points]
    above = [psnr.high - psnr.value for _, psnr in points]
    ours = method == TRAJECTORY
    axis.errorbar(
        [share for share, _ in points],
        [psnr.value for _, psnr in points],
        yerr=[below, above],
        label=method,
        marker=_MARKS[place % len(_MARKS)],
        color="black" if ours else f"C{place % 10}",
        linewidth=2.5 if ours else 1.0,
        linestyle="-" if place < 10 else "--",
        markersize=5,
        capsize=2,
    )
