"""The time that a new schedule costs, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_first_and_second_runs(
    benchmark: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solving, path = benchmark("solving"), tmp_path / "solving.json"
    monkeypatch.setattr(solving, "SPEEDUPS", (2.0, 3.0))
    options = ["--prompts", "4", "--repeats", "1", "--results", str(path)]
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    solving.main(["wan", *options])
    rows = json.loads(path.read_text())
    assert [row["compute_steps"] for row in rows] == [3, 2] * 3
    assert rows[0]["groups"] == rows[4]["groups"] == "one group" != rows[2]["groups"]
    assert [row["response"] for row in rows] == [False] * 4 + [True] * 2
    assert {row["repeats"] for row in rows} == {1}
    # Of so few steps every compute schedule is searched, with neighbouring budgets or without.
    assert all(row["behind_frontier_db"] == 0 for row in rows)
