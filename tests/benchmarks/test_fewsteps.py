from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ertacache.formats.policy import PolicyError, ValidationRow

Load = Callable[[str], Any]
ROW = {
    "model": "flux",
    "steps": 4,
    "compute_steps": 3,
    "speedup": 1.31,
    "psnr_db": 30.04,
    "plain_db": 20.0,
    "fewer_db": 25.0,
    "verdict": None,
    "prompts": 2,
}


def test_every_number_of_computed_steps_is_a_row(
    benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewsteps, path = benchmark("fewsteps"), tmp_path / "fewsteps.json"
    monkeypatch.setattr(fewsteps, "STEPS", (4, 6))
    seconds = count()  # one for every call: no policy is faster
    monkeypatch.setattr("ertacache.calibration.session.synchronized_time", lambda: next(seconds))
    small = ["--calibration", "2", "--heldout", "2", "--batch-size", "2", "--results", str(path)]
    fewsteps.main(["flux", *small])
    rows = json.loads(path.read_text())
    assert [(row["steps"], row["compute_steps"]) for row in rows] == [
        (4, 3),
        (4, 2),
        (6, 5),
        (6, 4),
        (6, 3),
    ]
    assert set(rows[0]) == set(ROW)
    assert {row["speedup"] for row in rows} == {1.0}
    slow = "not recommended: the policy is only 1.00x faster than the full run"
    assert {row["verdict"] for row in rows} == {slow}


def test_a_recommended_policy_has_no_verdict(
    benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewsteps, path = benchmark("fewsteps"), tmp_path / "fewsteps.json"
    names = ("policy", "plain reuse", "fewer steps")
    levels = {"policy": 30.04, "plain reuse": 20.0, "fewer steps": 25.0}
    measured = [ValidationRow(name, 3, levels[name], speedup=1.306, prompts=2) for name in names]
    plan = SimpleNamespace(validation=measured, compute_steps=(0, 1, 3))
    policy = SimpleNamespace(default=plan)
    monkeypatch.setattr(fewsteps, "calibrate", lambda *_, **__: policy)
    monkeypatch.setattr(fewsteps, "STEPS", (4,))
    fewsteps.main(["flux", "--results", str(path)])
    assert json.loads(path.read_text())[0] == ROW


def test_a_number_of_steps_without_a_plan_is_left_out(
    benchmark: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fewsteps, path = benchmark("fewsteps"), tmp_path / "fewsteps.json"

    def refuse(*_: Any, **__: Any) -> None:
        raise PolicyError("no plan with 3 of 4 computed steps")

    monkeypatch.setattr(fewsteps, "calibrate", refuse)
    monkeypatch.setattr(fewsteps, "STEPS", (4,))
    fewsteps.main(["flux", "--results", str(path)])
    assert json.loads(path.read_text()) == []
    assert "flux: no plan with 3 of 4 computed steps" in capsys.readouterr().out


def test_the_table_has_figures_and_verdict(benchmark: Load) -> None:
    benchmark("fewsteps")
    figuretables = import_module("figuretables")
    worse = ROW | {"compute_steps": 2, "verdict": "not worth it: 12.0 dB"}
    page = figuretables.fewsteps_table([ROW, worse])
    assert "| 4 | 3 | 1.31 | 30.0 | 20.0 | 25.0 | recommended |" in page
    assert page.endswith("| not recommended: 12.0 dB |")
