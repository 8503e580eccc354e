"""The benchmark of the quick start: what it runs is what the page shows, and a failure ends it."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("newcomer")


def test_the_parts_are_those_of_the_page(script: Any) -> None:
    found = dict(script.parts((ROOT / "docs" / "start.md").read_text()))
    assert list(found) == ["A first image", "A first policy", "In a script"]
    names = [shlex.split(line)[1] for line in found["A first policy"]]
    assert names == ["calibrate", "generate", "inspect"]
    (code,) = found["In a script"]
    assert "ertacache.attach(pipe" in shlex.split(code)[2]


def test_rows_and_table(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def seconds(lines: list[str], folder: Path, programs: Path) -> float:
        assert folder.is_dir()
        assert programs.parts[-2:] == (".venv", "bin")
        ran.append(lines[0].split()[0])
        return 12.3

    def clone(command: list[str], *, check: bool) -> None:
        page = Path(command[-1]) / "docs" / "start.md"
        page.parent.mkdir(parents=True)
        page.write_text("## Try\n```bash\nertacache demo\n```\n")

    monkeypatch.setattr(script, "seconds", seconds)
    monkeypatch.setattr(script.subprocess, "run", clone)
    script.main(["--output", str(tmp_path / "newcomer.json")])
    rows = json.loads((tmp_path / "newcomer.json").read_text())
    assert [row["part"] for row in rows] == ["Installation", "Demo", "Try"]
    assert ran == ["make", "make", "ertacache"]
    quiet = [row | {"load_before": 0.1} for row in rows]
    assert "| Try | 12 |" in script.newcomer_table(quiet)
    assert "busy" not in script.newcomer_table(quiet)
    assert "busy (load 9)" in script.newcomer_table([row | {"load_before": 9.0} for row in rows])


def test_a_failure_ends_it(script: Any, tmp_path: Path) -> None:
    assert script.seconds(["python -c pass"], tmp_path, tmp_path) > 0
    with pytest.raises(SystemExit, match=r"ended with 1: .*no such part"):
        script.seconds(["python -c 'raise SystemExit(\"no such part\")'"], tmp_path, tmp_path)
