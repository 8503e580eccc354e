"""Shared by the benchmarks of bundled models: results files, command line and progress.

A results file is a list of rows, each with the key "model"; a benchmark replaces the rows of the
models it was run on and keeps the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ertacache.calibration.session import Progress
from ertacache.formats.files import write_whole
from ertacache.formats.lock import locked
from ertacache.metrics import bootstrap_interval
from ertacache.models import MODELS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"

PATIENCE = 60.0  # seconds to wait for another benchmark that is writing its rows

Row = dict[str, Any]


def mean_row(values: Sequence[float], name: str = "psnr") -> Row:
    """A mean in dB with its interval."""
    low, high = bootstrap_interval(values)
    mean = sum(values) / len(values)
    return {
        f"{name}_db": round(mean, 2),
        f"{name}_low": round(low, 2),
        f"{name}_high": round(high, 2),
    }


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file, none if it does not exist."""
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def replace_rows(path: Path, model: str, rows: Iterable[Row]) -> None:
    """Replace the rows of a model."""
    order = {name: place for place, name in enumerate(MODELS)}
    with locked(path, timeout=PATIENCE):
        others = [row for row in read_rows(path) if row["model"] != model]
        found = sorted([*others, *rows], key=lambda row: order.get(row["model"], len(order)))
        write_whole(path, json.dumps(found, indent=1) + "\n")


class ModelParser(argparse.ArgumentParser):
    """The command line of a benchmark: first the models, all of them if none is named."""

    def __init__(self, text: str | None) -> None:
        """Take the description from the first line of the script's docstring."""
        super().__init__(description=(text or "").splitlines()[0])
        listed = ", ".join(MODELS)
        self.add_argument("models", nargs="*", metavar="MODEL", help=f"of {listed}")

    def parse(self, arguments: list[str] | None) -> argparse.Namespace:
        """Parse the arguments; ``models`` is never empty."""
        options = self.parse_args(arguments)
        unknown = [name for name in options.models if name not in MODELS]
        if unknown:
            self.error(f"unknown model {unknown[0]!r}; there are {', '.join(MODELS)}")
        options.models = options.models or list(MODELS)
        return options


def show_progress(title: str) -> Progress:
    """A callback that prints the completed and the total number of runs."""

    def report(done: int, total: int) -> None:
        print(f"\r{title}: {done} of {total}   ", end="" if done < total else "\n", flush=True)

    return report
