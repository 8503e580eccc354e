"""The plots of the figures page, each from the rows of its results file. Runs no model.

Draws ``docs/images/sensitivity-MODEL.png`` and ``curves-MODEL.png`` again, from
``results/sensitivity.json`` and ``results/curves.json``; the benchmarks of these names do so after
they have measured. The last line of standard output is the JSON of the files written, compact.

    python benchmarks/plots.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rows import RESULTS, ROOT, Row, read_rows

from ertacache.figures import REFERENCE, SERIES, Series, new_figure, styled, to_png
from ertacache.formats.files import write_whole

IMAGES = ROOT / "docs" / "images"
# How a method is drawn, and a factor that keeps points at the same number apart.
LINES = {
    "trajectory": (SERIES[0], 1.06),
    "trajectory, no refit": (replace(SERIES[2], line="--"), 0.97),
    "paper": (SERIES[1], 1.0),
}


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes for the same numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_png(figure))


@styled()
def draw_sensitivity(rows: Sequence[Row], path: Path) -> None:
    """PSNR against the number of calibration prompts, a panel per budget."""
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    figure = new_figure(4.2 * len(budgets), 3.8)
    axes = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axis, budget in zip(axes, budgets, strict=True):
        here = [row for row in rows if row["budget"] == budget]
        for method, (series, shift) in LINES.items():
            own = [row for row in here if row["method"] == method]
            _sensitivity_line(axis, own, series, shift)
        for row in here:
            if row["method"] == "fewer steps":
                line = REFERENCE.options(label="fewer steps", marker="")
                axis.axhline(row["psnr_db"], **line)
        numbers = sorted({row["prompts"] for row in here} - {0})
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.minorticks_off()
        axis.set_xlabel("calibration prompts")
        axis.set_title(f"{budget} of {rows[0]['steps']} steps computed")
    axes[0].set_ylabel("PSNR to the full run [dB]")
    handles = dict(zip(*reversed(axes[-1].get_legend_handles_labels()), strict=True))
    names = [name for name in (*LINES, "fewer steps") if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=4)
    save(figure, path)


def _sensitivity_line(axis: Any, rows: Sequence[Row], series: Series, shift: float) -> None:
    """Means with intervals over held-out prompts, and beside them a cross for every choice."""
    if not rows:
        return
    ranked = sorted(rows, key=lambda row: row["prompts"])
    x, y = [shift * row["prompts"] for row in ranked], [row["psnr_db"] for row in ranked]
    spread = [
        [row["psnr_db"] - row["psnr_low"] for row in ranked],
        [row["psnr_high"] - row["psnr_db"] for row in ranked],
    ]
    options = series.options(label=ranked[0]["method"], elinewidth=1)
    axis.errorbar(x, y, yerr=spread, **options)
    for row in ranked:
        places = [1.1 * shift * row["prompts"]] * len(row["choices_db"])
        axis.plot(places, row["choices_db"], "x", color=series.color, alpha=0.6, markersize=3)


@styled()
def draw_curves(row: Row, path: Path) -> None:
    """TeaCache's estimate beside what the paper reuses and beside what it was fitted to."""
    figure = new_figure(8.4, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    titles = {
        "residual": ("residual v - x (the paper's)", SERIES[0]),
        "output": ("output of the network", SERIES[2]),
    }
    estimate = replace(SERIES[3], line="--")
    steps = list(range(1, row["steps"]))
    for axis, (name, (title, series)) in zip(axes, titles.items(), strict=True):
        shown = ((name, title, series), ("estimate", "TeaCache's estimate", estimate))
        for key, label, drawn in shown:
            curve = row[key]
            axis.plot(steps, curve["mean"], **drawn.options(marker="", linewidth=1.8, label=label))
            band = {"color": drawn.color, "alpha": 0.18, "linewidth": 0}
            axis.fill_between(steps, curve["low"], curve["high"], **band)
        found = row[f"estimate_with_{name}"]["mean"]
        axis.set_title(f"correlation with the estimate {found:.2f}")
        axis.set_xlabel("step")
        axis.set_yscale("log")
        axis.legend()
    axes[0].set_ylabel("relative L1 change from the step before")
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    """Draw every figure whose results are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder of the plots")
    options = parser.parse_args(arguments)
    written = []
    rows = read_rows(options.results / "sensitivity.json")
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        written.append(options.images / f"sensitivity-{model}.png")
        draw_sensitivity(list(group), written[-1])
    for row in read_rows(options.results / "curves.json"):
        written.append(options.images / f"curves-{row['model']}.png")
        draw_curves(row, written[-1])
    print(json.dumps([path.name for path in written], separators=(",", ":")))


if __name__ == "__main__":
    main()
