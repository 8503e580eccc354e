"""``report``: the page is written where it may be, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ertacache.bench.results import BenchRow, Interval, write_results
from ertacache.cli import report as command
from ertacache.report import page
from tests.cli.conftest import Refused, Run
from tests.formats.faults import full_disk


def test_the_page_is_written(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        page, "make_page", lambda paths, progress: "<html>" + " ".join(map(str, paths))
    )
    path = tmp_path / "page.html"
    result = run("report", "a.json", "b.json", "-o", path)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Report in {path}\n"
    assert path.read_text() == "<html>a.json b.json"


def test_json_has_the_speedups_that_look_the_same(tmp_path: Path, run: Run) -> None:
    same, path = Interval(50.0, 49.0, 51.0), tmp_path / "bench.json"
    row = BenchRow("m", "x", 2.0, 30, psnr=same, psnr_tenth=45.0, flops_ratio=0.5)
    write_results(path, {"model": "m"}, [row])
    result = run("report", path, "-o", tmp_path / "page.html", "--json", "-")
    assert json.loads(result.stdout) == {
        "report": str(tmp_path / "page.html"),
        "same": {"m": {"x": {"speedup": 2.0, "bound": "at least"}}},
    }
    assert "report: 2 of 2 in" in result.stderr


def test_what_is_refused(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "absent.json"
    assert str(absent) in refused("report", absent, "-o", tmp_path / "page.html")
    assert "call it page.html" in refused("report", "a.json", "-o", "page.pdf")
    assert "cannot write '.': it is a folder" in refused("report", "a.json", "-o", ".")
    monkeypatch.setattr(page, "make_page", lambda paths, progress: "<html>")
    nowhere = tmp_path / "a" / "page.html"
    assert f"cannot write '{nowhere}'" in refused("report", "a.json", "-o", nowhere)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "pip install 'ertacache[plots]'" in refused("report", "a.json", "-o", nowhere)
    assert list(tmp_path.iterdir()) == []


def test_report_on_a_full_disk_leaves_no_truncated_page(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "make_page", lambda paths, progress: "<html>" * 100)
    path = tmp_path / "page.html"
    with full_disk():
        result = run("report", "a.json", "-o", path, "--quiet")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {str(path)!r}: File too large\n"
    assert list(tmp_path.iterdir()) == []
