"""Plots of benchmark rows. Knows rows, not how they came about."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ertacache.bench.rows import BenchRow

__all__ = ["draw_pareto", "pareto"]

OURS = "trajectory"
_MARKS = "osD^v<>Phd*pX"


def _svg(figure: Any) -> str:
    """The picture as an element that stands in a page by itself."""
    text = io.StringIO()
    # Without a date and with fixed ids the same rows give the same page.
    figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def pareto(rows: Sequence[BenchRow]) -> str:
    """The plot of `draw_pareto` as SVG text."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "ertacache", "svg.fonttype": "none"}):
        return _svg(draw_pareto(rows))


def draw_pareto(rows: Sequence[BenchRow]) -> Any:
    """PSNR to the full run against the share of the network's FLOPs, one line per method.

    Returns:
        A matplotlib figure; the legend has the method with the best mean first.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.psnr_db is not None and row.method != "full"]
    figure = Figure(figsize=(8, 5))
    axis = figure.subplots()
    for place, method in enumerate(dict.fromkeys(row.method for row in shown)):
        _draw(axis, [row for row in shown if row.method == method], place)
    shares = [row.flops_ratio or 0.0 for row in shown] or [0.0, 1.0]
    axis.set_xlim(max(0.0, min(shares) - 0.05), max(shares) + 0.05)
    axis.set_xlabel("FLOPs of the network, share of the full run")
    axis.set_ylabel("PSNR to the full run [dB]")
    axis.grid(alpha=0.3)
    if shown:
        lines, names = axis.get_legend_handles_labels()
        heights = [max(row.psnr_db or 0.0 for row in shown if row.method == n) for n in names]
        order = sorted(range(len(names)), key=lambda k: -heights[k])
        axis.legend(
            [lines[k] for k in order],
            [names[k] for k in order],
            fontsize=8,
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
        )
    return figure


def _draw(axis: Any, rows: Sequence[BenchRow], place: int) -> None:
    ranked = sorted(rows, key=lambda row: row.flops_ratio or 0.0)
    x = [row.flops_ratio for row in ranked]
    y = [row.psnr_db or 0.0 for row in ranked]
    below = [(row.psnr_db or 0.0) - (row.psnr_low or 0.0) for row in ranked]
    above = [(row.psnr_high or 0.0) - (row.psnr_db or 0.0) for row in ranked]
    ours = ranked[0].method == OURS
    axis.errorbar(
        x,
        y,
        yerr=[below, above],
        label=ranked[0].method,
        marker=_MARKS[place % len(_MARKS)],
        color="black" if ours else f"C{place % 10}",
        linewidth=2.5 if ours else 1.0,
        linestyle="-" if place < 10 else "--",
        markersize=5,
        capsize=2,
    )
