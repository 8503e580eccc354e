"""The plots of the figures page, each from the rows of its results file. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import Row

from ertacache.formats.files import draft

# Colour, marker, line, and a factor that keeps points at the same number apart.
LINES = {
    "trajectory": ("black", "o", "-", 1.06),
    "trajectory, no refit": ("C0", "s", "--", 0.97),
    "paper": ("C3", "^", "-", 1.0),
}


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes for the same numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft(path) as made:
        figure.savefig(made, dpi=120, bbox_inches="tight", metadata={"Software": None})


def draw_sensitivity(rows: Sequence[Row], path: Path) -> None:
    """PSNR against the number of calibration prompts, a panel per budget."""
    from matplotlib.figure import Figure

    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    figure = Figure(figsize=(5 * len(budgets), 4))
    axes = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axis, budget in zip(axes, budgets, strict=True):
        here = [row for row in rows if row["budget"] == budget]
        for method, style in LINES.items():
            _sensitivity_line(axis, [row for row in here if row["method"] == method], style)
        for row in here:
            if row["method"] == "fewer steps":
                axis.axhline(row["psnr_db"], color="grey", linestyle=":", label="fewer steps")
        numbers = sorted({row["prompts"] for row in here} - {0})
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.minorticks_off()
        axis.set_xlabel("calibration prompts")
        axis.set_title(f"{budget} of {rows[0]['steps']} steps computed", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("PSNR to the full run [dB]")
    handles = dict(zip(*reversed(axes[-1].get_legend_handles_labels()), strict=True))
    names = [name for name in (*LINES, "fewer steps") if name in handles]
    axes[-1].legend(
        [handles[name] for name in names],
        names,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )
    save(figure, path)


def _sensitivity_line(axis: Any, rows: Sequence[Row], style: tuple[str, str, str, float]) -> None:
    """Means with intervals over held-out prompts, and beside them a cross for every choice."""
    if not rows:
        return
    ranked = sorted(rows, key=lambda row: row["prompts"])
    color, marker, line, shift = style
    x, y = [shift * row["prompts"] for row in ranked], [row["psnr_db"] for row in ranked]
    spread = [
        [row["psnr_db"] - row["psnr_low"] for row in ranked],
        [row["psnr_high"] - row["psnr_db"] for row in ranked],
    ]
    axis.errorbar(
        x,
        y,
        yerr=spread,
        label=ranked[0]["method"],
        color=color,
        marker=marker,
        linestyle=line,
        markersize=4,
        capsize=2,
        linewidth=1.5,
    )
    for row in ranked:
        places = [1.1 * shift * row["prompts"]] * len(row["choices_db"])
        axis.plot(places, row["choices_db"], "x", color=color, alpha=0.6, markersize=3)


def draw_curves(row: Row, path: Path) -> None:
    """TeaCache's estimate beside what the paper reuses and beside what it was fitted to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, 2, sharey=True)
    titles = {
        "residual": ("residual v - x (the paper's)", "C0"),
        "output": ("output of the network", "C2"),
    }
    steps = list(range(1, row["steps"]))
    for axis, (name, (title, color)) in zip(axes, titles.items(), strict=True):
        for key, label, shade in ((name, title, color), ("estimate", "TeaCache's estimate", "C1")):
            curve = row[key]
            axis.plot(steps, curve["mean"], color=shade, label=label)
            axis.fill_between(
                steps, curve["low"], curve["high"], color=shade, alpha=0.25, linewidth=0
            )
        found = row[f"estimate_with_{name}"]["mean"]
        axis.set_title(f"correlation with the estimate {found:.2f}", fontsize=10)
        axis.set_xlabel("step")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("relative L1 change from the step before")
    save(figure, path)
