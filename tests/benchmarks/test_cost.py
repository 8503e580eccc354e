"""The cost of a calibration: counts on a tiny pipeline, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.tiny import STEPS

Load = Callable[[str], Any]


def test_every_stage_is_counted(benchmark: Load, tmp_path: Path) -> None:
    cost, path = benchmark("cost"), tmp_path / "cost.json"
    cost.main(["flux", "--calibration", "4", "--batch-size", "4", "--results", str(path)])
    (row,) = json.loads(path.read_text())
    assert (row["model"], row["prompts"], row["steps"]) == ("flux", 4, STEPS)
    assert row["profile"] == 4 * STEPS
    assert row["trial"] > row["profile"]
    assert row["refit_2x"] > 4 * STEPS / 2
    assert row["refit_3x"] > 4 * STEPS / 3


def test_the_table_is_in_full_runs(benchmark: Load) -> None:
    table = benchmark("cost").cost_table
    row = {"model": "m", "prompts": 8, "steps": 30, "profile": 240, "trial": 1200}
    row |= {"refit_2x": 600, "refit_3x": 480}
    assert table([row]).splitlines() == [
        "| full runs for each prompt | profile | trial | refit at 2x | refit at 3x | all |",
        "|---|--:|--:|--:|--:|--:|",
        "| `m`, 8 prompts | 1.0 | 5.0 | 2.5 | 2.0 | 10.5 |",
    ]
    assert table([]) == "Not measured yet."
