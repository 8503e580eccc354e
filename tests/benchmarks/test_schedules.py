"""The benchmark of other schedules, with few steps and prompts."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ertacache.models import MODELS

ARGUMENTS = ["--calibration", "2", "--heldout", "1", "--refit-prompts", "2", "--batch", "2"]


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(import_module("policies"), "FOLDER", tmp_path / "policies")
    module = import_module("schedules")
    short = {name: row.call_arguments | {"num_inference_steps": 10} for name, row in MODELS.items()}
    monkeypatch.setattr(
        type(MODELS["emoji-flux"]), "call_arguments", property(lambda row: short[row.name])
    )
    return module


def test_rows_are_written_and_kept(schedules: Any, tmp_path: Path) -> None:
    path = tmp_path / "schedules.json"
    chosen = ["emoji-flux", *ARGUMENTS, "--results", str(path), "--varied"]
    schedules.main([*chosen, "strength"])
    half, third = json.loads(path.read_text())
    assert (half["varied"], half["steps"], half["compute_steps"]) == ("strength", 6, 3)
    assert (third["varied"], third["steps"], third["compute_steps"]) == ("strength", 6, 2)
    assert all(half[f"{name}_db"] > 10 for name in ("resampled", "own", "refit", "fewer"))
    schedules.main([*chosen, "scheduler"])
    rows = json.loads(path.read_text())
    assert [row["varied"] for row in rows] == ["strength"] * 2 + ["scheduler"] * 2
    assert rows[:2] == [half, third]
    schedules.main([*chosen, "scheduler", "--resume"])
    assert json.loads(path.read_text()) == rows


def test_the_table_says_where_it_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    tables = import_module("scheduletables")
    row = {"model": "m", "varied": "steps", "value": 8, "steps": 8, "compute_steps": 4}
    row |= {"resampled_db": 50.0, "resampled_low": 49.0, "resampled_high": 51.0, "own_db": 51.0}
    row |= {"refit_db": 52.0, "fewer_db": 40.0, "prompts": 64}
    assert "Ahead of fewer steps in every row. In the median ahead by 10.0 dB" in (
        tables.schedules_table([row])
    )
    behind = tables.schedules_table([row, row | {"fewer_db": 55.0, "value": 9}])
    assert "in all rows but: m, 9 steps, 4 of 8." in behind
    assert tables.schedules_table([]) == tables.predictions_table([]) == "Not measured yet."


def test_the_table_of_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    tables = import_module("scheduletables")
    row = {"model": "m", "steps": 8, "compute_steps": 4, "predicted_rmse": 0.01}
    rows = [row | {"measured_rmse": 0.012, "ratio": 1.2}]
    assert "Within a factor of 1.5 in every row; the worst is off by a factor of 1.20." in (
        tables.predictions_table(rows)
    )
    rows.append(row | {"measured_rmse": 0.005, "ratio": 0.5})
    assert "in all rows but 1; the worst is off by a factor of 2.00" in (
        tables.predictions_table(rows)
    )
