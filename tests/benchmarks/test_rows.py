"""The rows of results files: whole or not at all, and not lost to another benchmark."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import FOLDER
from tests.formats.faults import full_disk, holding_lock


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("rows")


def test_the_rows_of_other_models_stay(rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows.replace_rows(path, "emoji-wan", [{"model": "emoji-wan"}])
    rows.replace_rows(path, "emoji-flux", [{"model": "emoji-flux", "psnr_db": 1}])
    rows.replace_rows(path, "emoji-flux", [{"model": "emoji-flux", "psnr_db": 2}])
    found = [{"model": "emoji-flux", "psnr_db": 2}, {"model": "emoji-wan"}]
    assert rows.read_rows(path) == found
    with full_disk(), pytest.raises(OSError, match=r"rows.json"):
        rows.replace_rows(path, "emoji-flux", [{"model": "emoji-flux"}] * 9)
    assert rows.read_rows(path) == found
    assert list(tmp_path.iterdir()) == [path]


def test_two_benchmarks_write_one_file(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(rows, "PATIENCE", 0.1)
    with holding_lock(path) as other:
        with pytest.raises(ValueError, match=f"written by process {other.pid}"):
            rows.replace_rows(path, "emoji-flux", [])
        monkeypatch.setattr(rows, "PATIENCE", 60.0)
        other.kill()
        rows.replace_rows(path, "emoji-flux", [])
    assert rows.read_rows(path) == []
