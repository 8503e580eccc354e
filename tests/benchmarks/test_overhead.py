"""The cost of a reused step, with a clock that shows how often it was read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

Load = Callable[[str], Any]


def test_both_methods_at_two_budgets(
    benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead, path = benchmark("overhead"), tmp_path / "overhead.json"
    seconds = count()  # one from the end of a step to that of the next, computed or not
    monkeypatch.setattr(overhead, "synchronized_time", lambda: next(seconds))
    overhead.main(["flux", "--runs", "2", "--threads", "1", "--output", str(path)])
    rows = json.loads(path.read_text())
    assert [row["method"] for row in rows] == ["trajectory", "trajectory, groups", "paper"] * 2
    assert [row["compute_steps"] for row in rows if row["method"] == "trajectory"] == [4, 2]
    assert {row["runs"] for row in rows} == {2}
    assert rows[1]["cached_bytes"] >= rows[0]["cached_bytes"] > 0
    for row in rows:
        assert (row["full_seconds"], row["seconds"], row["speedup"]) == (8, 8, 1.0)
        assert row["reused_step_percent"] == 100
        assert row["percent_of_ideal"] == pytest.approx(100 * row["compute_steps"] / 8)


def test_a_variant_sorts_its_steps(benchmark: Load) -> None:
    overhead = benchmark("overhead")
    full = overhead.Variant("full")
    full.note([0.0, 1.0, 3.0])
    assert (full.loops, full.computed, full.reused) == ([3.0], [1.0, 2.0], [])
