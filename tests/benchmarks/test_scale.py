"""The benchmark of several processes: its rows, and that files which differ are an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

Load = Callable[[str], Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a script by name; it loads no model."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module


def test_rows_and_table(script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = script("scale")

    def run(count: int, folder: Path, command: str, *_: str) -> float:
        (folder / "policy.safetensors").write_text(command)
        return 10.0 / count

    monkeypatch.setattr(scale, "run", run)
    path = tmp_path / "scale.json"
    scale.main(["--prompts", "4", "--steps", "8", "--output", str(path)])
    rows = json.loads(path.read_text())
    assert [row["processes"] for row in rows] == [1, 2, 4]
    assert [row["refit_seconds"] for row in rows] == [10.0, 5.0, 2.5]
    table = script("tables").scale_table
    assert "the files are equal to the bit" in table(rows)
    assert "| 4 | 2.5 | 2.5 |" in table(rows)
    busy = [row | {"load_before": 9.0} for row in rows]
    assert "busy (load 9)" in table(busy)


def test_files_that_differ_are_an_error(
    script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = script("scale")

    def run(count: int, folder: Path, *_: str) -> float:
        (folder / "policy.safetensors").write_text(str(count))
        return 1.0

    monkeypatch.setattr(scale, "run", run)
    with pytest.raises(SystemExit, match="the files differ"):
        scale.main(["--output", str(tmp_path / "scale.json")])
    assert not (tmp_path / "scale.json").exists()
