"""The benchmarks that need no model, on short runs, and the help of all benchmarks."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import FOLDER

COMMANDS = sorted(
    path for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module


def test_every_method_on_a_flow(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flows, path = load("flows"), tmp_path / "flows.json"
    monkeypatch.setattr(flows, "CASES", [(2.0, 0.3, 12)])
    monkeypatch.setattr(flows, "draw", lambda case, budget, path: path.touch())
    flows.main(["--results", str(path), "--images", str(tmp_path)])
    (case,) = json.loads(path.read_text())["cases"]
    found = {row["method"]: row for row in case["rows"]}
    assert {*flows.PANELS, "fewer steps", "paper: all three"} == set(found)
    assert all(2 <= row["computed_steps"] <= 4 for row in found.values())
    for name in ("ours: profile", "ours: closed loop"):
        assert found[name]["rmse"] < found["plain reuse"]["rmse"] / 2
    assert (tmp_path / "trajectories.png").exists()


def test_the_frontier_of_latents_of_several_sizes(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontier, path = load("frontier"), tmp_path / "frontier.json"
    for name, value in {"STEPS": 6, "PROMPTS": 2, "REPEATS": 1}.items():
        monkeypatch.setattr(frontier, name, value)
    frontier.main(["--results", str(path)])
    record = json.loads(path.read_text())
    assert [row["latent_elements"] for row in record["rows"]] == [64, 1024, 8192]
    assert (record["num_steps"], record["num_prompts"], record["budgets"]) == (6, 2, 5)


@pytest.mark.parametrize("name", [path.stem for path in COMMANDS])
def test_help(load: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(name).main(["--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out
