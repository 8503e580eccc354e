"""The benchmark of groups, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Load = Callable[[str], Any]


def test_three_policies_at_three_sizes(
    benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, path = benchmark("groups"), tmp_path / "groups.json"
    monkeypatch.setattr(groups, "SPEEDUPS", (2.0, 3.0))
    options = ["--calibration", "4", "--heldout", "2", "--batch", "2", "--results", str(path)]
    groups.main(["wan", *options])
    rows = json.loads(path.read_text())
    sizes = [(32, 32), (48, 48), (32, 48)]
    assert [(row["height"], row["width"]) for row in rows] == [s for s in sizes for _ in range(2)]
    assert [row["calibrated"] for row in rows] == [True, True, False, False, False, False]
    assert [row["compute_steps"] for row in rows] == [3, 2] * 3
    for row in rows:
        assert all(row[f"{kind}_p10"] <= row[f"{kind}_db"] for kind in (*groups.KINDS, "fewer"))
        assert row["gain_db"] == pytest.approx(row["chosen_db"] - row["one_db"], abs=0.02)
    assert rows[0]["one_plan"].startswith("one group, ")
    assert "branch" not in rows[0]["groups_plan"]
