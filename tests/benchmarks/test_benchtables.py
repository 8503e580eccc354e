"""The tables and sentences of the benchmark, from rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ertacache.bench.results import BenchRow, Interval, write_results
from tests.benchmarks.conftest import FOLDER


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module


def around(value: float, spread: float) -> Interval:
    return Interval(value, value - spread, value + spread)


def row(method: str, psnr: float, *, spread: float = 1.0, **more: Any) -> BenchRow:
    fields: dict[str, Any] = {"flops_ratio": 0.5, "seconds": 1.0, "prompts": 64}
    fields |= {"speedup": around(2.0, 0.1), "psnr": around(psnr, spread)}
    fields |= {"cached_bytes": 2000, "setting": "15 steps", "psnr_tenth": psnr - 5.0}
    return BenchRow("m", method, 2.0, 30, **(fields | more))


def test_a_clear_lead(load: Callable[[str], Any]) -> None:
    verdict = load("benchtables").verdict
    ours = row("trajectory", 50.0, lpips=Interval(0.01, 0.005, 0.015))
    far = row("uniform", 40.0, lpips=Interval(0.10, 0.05, 0.15))
    text = verdict([ours, far])
    assert text == (
        "At 2x trajectory leads in PSNR and LPIPS with an interval apart from every baseline's."
    )
    dear = row("PAB", 90.0, flops_ratio=0.9)
    cheap = row("T-GATE", 30.0, flops_ratio=0.3)
    assert verdict([ours, far, dear, cheap]) == (
        f"{text} Of another cost than trajectory (0.50 of the FLOPs), and counted only where "
        "cheaper and better: *PAB* (0.90) and *T-GATE* (0.30)."
    )
    great = row("T-GATE", 60.0, flops_ratio=0.3)
    assert "is behind *T-GATE* (intervals apart) in PSNR" in verdict([ours, far, great])
    assert verdict([far]) == ""
    assert verdict([ours]) == "At 2x trajectory has no baseline to compare with."


def test_no_lead_is_reported(load: Callable[[str], Any]) -> None:
    verdict = load("benchtables").verdict
    ours = row("trajectory", 50.0, lpips=Interval(0.10, 0.08, 0.12))
    near = row("uniform", 49.0, lpips=Interval(0.01, 0.005, 0.02))
    assert verdict([ours, near]) == (
        "At 2x trajectory has the best mean, with an interval that overlaps that of *uniform*, in "
        "PSNR; is behind *uniform* (intervals apart) in LPIPS."
    )
    paired = row("uniform", 49.0, lead=Interval(1.0, 0.84, 1.2))
    assert verdict([ours, paired]).endswith(
        " in PSNR. Prompt by prompt its PSNR is 1.0 dB above that of *uniform* (+0.8 to +1.2)."
    )
    better = row("uniform", 51.0)
    assert "is behind *uniform* (intervals overlap) in PSNR" in verdict([ours, better])
    many = [row(f"method {k}", 60.0 + k, spread=20.0) for k in range(6)]
    assert "is behind *method 5*, *method 4*, *method 3* and 3 more (" in verdict([ours, *many])
    refitted = row("trajectory, no refit", 60.0)  # ours as well, no baseline
    assert verdict([ours, refitted]) == "At 2x trajectory has no baseline to compare with."


def test_the_page_of_a_model(load: Callable[[str], Any]) -> None:
    tables = load("benchtables")
    full = BenchRow("m", "full", 1.0, 30, seconds=2.0, prompts=64)
    inapplicable = [
        BenchRow("m", "T-GATE", b, 30, why_not="no cross-attention") for b in (2.0, 3.0)
    ]
    rows = [full, row("paper", 40.0), row("trajectory", 50.0), row("uniform", 30.0), *inapplicable]
    text = tables.model_table(rows)
    assert "30 steps, 64 held-out prompts. The full run takes 2.00 s per call (median)." in text
    cells = "15 steps | 0.500 | 2.00 | 1.00 | not available | not available"
    lines = [line for line in text.splitlines() if cells in line]
    assert [line.split(" | ")[0] for line in lines] == ["| **trajectory**", "| paper", "| uniform"]
    assert lines[0].endswith("50.00 (49.00 to 51.00) | 45.0 | 2 |")
    assert text.count("no cross-attention") == 1
    assert "| uniform reuse | 2x | not available | not available | 30.00" in text
    assert tables.model_table([]) == "Not measured yet."


def test_the_largest_speedups_that_look_the_same(load: Callable[[str], Any]) -> None:
    table = load("benchtables").same_table
    rows = [
        row("uniform", 39.0),
        row("trajectory", 50.0),
        replace(row("trajectory", 30.0, flops_ratio=0.25), budget=4.0),
        replace(row("trajectory", 50.0), model="emoji-wan"),
        BenchRow("m", "T-GATE", 2.0, 30, why_not="no cross-attention"),
    ]
    assert table(rows).splitlines() == [
        "| method | emoji-wan | m |",
        "|---|--:|--:|",
        "| **trajectory** | 2.0x and more | 3.0x |",
        "| uniform | - | < 2.0x |",
    ]
    assert table([]) == "Not measured yet."


def at(budget: float, found: BenchRow) -> BenchRow:
    """The same row at another budget, which it keeps to."""
    return replace(found, budget=budget, flops_ratio=1 / budget)


def test_the_table_of_the_first_page(load: Callable[[str], Any]) -> None:
    table = load("benchtables").front_table
    methods = {
        "trajectory": 50.0,
        "A": 41.0,
        "B": 43.0,
        "C": 42.0,
        "D": 30.0,
        "paper, policy only": 48.0,
    }
    rows = [
        replace(at(budget, row(method, psnr - 5 * budget)), model=model)
        for method, psnr in methods.items()
        for budget in (2.0, 3.0)
        for model in ("emoji-wan", "m")
        if (method, model) != ("C", "m")  # on half of the models, which is enough
    ]
    rows += [row("PAB", 60.0, flops_ratio=0.8), row("T-GATE", 60.0)]  # too dear; a quarter only
    rows += [BenchRow("m", "full", 1.0, 30, psnr=around(99.0, 0.0))]
    assert table(rows).splitlines() == [
        "| | wan | m |",
        "|---|--:|--:|",
        "| *looks the same up to* | | |",
        "| **ertacache** | 2.0x | 2.0x |",
        "| B | < 2.0x | < 2.0x |",
        "| C | < 2.0x | - |",
        "| A | < 2.0x | < 2.0x |",
        "| *PSNR at 2x / 3x, dB* | | |",
        "| **ertacache** | 40.0 / 35.0 | 40.0 / 35.0 |",
        "| B | 33.0 / 28.0 | 33.0 / 28.0 |",
        "| C | 32.0 / 27.0 | - |",
        "| A | 31.0 / 26.0 | 31.0 / 26.0 |",
    ]
    before = [replace(each, psnr_tenth=None) for each in rows]
    assert table(before).splitlines()[2] == "| *PSNR at 2x / 3x, dB* | | |"
    assert table([]) == table([row("uniform", 40.0)]) == "Not measured yet."


def test_the_summary_has_a_column_per_model_and_budget(load: Callable[[str], Any]) -> None:
    table = load("benchtables").summary_table
    rows = [
        row("uniform", 40.0),
        row("trajectory", 50.0),
        row("PAB", 45.0, flops_ratio=0.8),
        replace(row("trajectory", 41.0, flops_ratio=0.33), budget=3.0),
        replace(row("uniform", 30.0, flops_ratio=0.67), budget=1.5),  # not on this page
        replace(row("uniform", 61.0), model="emoji-wan"),
        BenchRow("m", "T-GATE", 2.0, 30, why_not="no cross-attention"),
    ]
    assert table(rows).splitlines() == [
        "| PSNR, dB | wan 2x | m 2x | m 3x |",
        "|---|--:|--:|--:|",
        "| uniform | 61.0 | 40.0 | - |",
        "| **trajectory** | - | 50.0 | 41.0 |",
        "| PAB | - | (45.0) | - |",
        "| T-GATE | - | - | - |",
    ]
    assert table([]) == "Not measured yet."


def test_a_plot_for_every_file(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("emoji-wan", "another", "emoji-flux"):
        rows = [row("trajectory", 50.0), row("uniform", 40.0)]
        write_results(tmp_path / f"bench-{name}.json", {"model": name}, rows)
    (tmp_path / "bench-emoji-wan.journal.jsonl").write_text("")
    load("pareto").main(["--results", str(tmp_path), "--images", str(tmp_path)])
    written = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert written == [f"pareto-{name}.png" for name in ("emoji-flux", "emoji-wan", "another")]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in written)
