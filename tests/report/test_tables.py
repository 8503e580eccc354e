"""Tables of rows with and without numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ertacache.bench.results import BenchRow, Interval
from ertacache.report.tables import Reach, quality_table, reaches, reasons, same_table, tell_apart

SILENT = BenchRow("m", "T-GATE", 2.0, 30, why_not="no <cross-attention>")


def row(method: str, budget: float, psnr: float, tenth: float | None) -> BenchRow:
    close = Interval(psnr, psnr, psnr)
    return BenchRow(
        "m", method, budget, 30, psnr=close, psnr_tenth=tenth, flops_ratio=1 / budget, seconds=1.5
    )


def heads(table: str) -> list[str]:
    return re.findall(r'<th scope="col"[^>]*>([^<]+)', table)


def test_the_best_is_first_and_cells_have_their_numbers() -> None:
    table = quality_table([row("y", 2.0, 40.0, 36.0), SILENT, row("x", 2.0, 45.0, 44.0)], name="t")
    assert re.findall(r'<tr data-method="(\w+)"', table) == ["x", "y"]
    assert 'data-value="45"' in table
    assert re.findall(r'aria-sort="descending">([^<]+)', table) == ["PSNR [dB] ↑"]
    assert "T-GATE" not in table


def test_what_costs_more_than_its_budget_is_in_brackets_and_last() -> None:
    dear = replace(row("dear", 2.0, 60.0, 55.0), flops_ratio=0.8)
    table = quality_table([dear, SILENT, row("x", 2.0, 45.0, 44.0)], name="t")
    assert re.findall(r'<tr data-method="(\w+)"', table) == ["x", "dear"]
    assert 'data-value="-940">(60.00' in table


def test_models_of_one_name_are_told_apart_by_their_files() -> None:
    one, two, three = [row("x", 2.0, 45.0, 44.0)], [row("x", 2.0, 50.0, 44.0)], list[BenchRow]()
    files = [Path("a/short.json"), Path("a/long.json"), Path("b/long.json")]
    found = tell_apart([(files[0], one), (files[1], two), (files[2], three)])
    assert [rows[0].model for rows in found[:2]] == ["m (short)", f"m ({files[1]})"]
    assert tell_apart([(files[0], one), (files[2], three)]) == [one, three]


def test_columns_that_no_row_has_are_left_out() -> None:
    old, new = row("x", 2.0, 45.0, None), row("x", 2.0, 45.0, 44.0)
    assert "p10 [dB] ↑" not in heads(quality_table([old], name="t"))
    assert heads(quality_table([old, new], name="t"))[-2:] == ["p10 [dB] ↑", "PSNR [dB] ↑"]
    assert not {"FID ↓", "flickering ↑"} & set(heads(quality_table([new], name="t")))


def test_reasons_are_given_once() -> None:
    found = reasons([SILENT, SILENT, row("x", 2.0, 45.0, 44.0)])
    assert found.count("T-GATE") == 1
    assert "no &lt;cross-attention&gt;" in found
    assert reasons([]) == ""


def test_the_largest_speedups_by_hand() -> None:
    rows = [
        *(row("never", budget, 30.0, 20.0) for budget in (1.5, 2.0)),
        *(row("always", budget, 50.0, 45.0) for budget in (1.5, 2.0)),
        row("between", 2.0, 45.0, 40.0),
        row("between", 4.0, 35.0, 30.0),
        row("old", 2.0, 45.0, None),
    ]
    assert reaches(rows) == {
        "between": {"m": Reach(3.0, "exact")},
        "always": {"m": Reach(2.0, "at least")},
        "never": {"m": Reach(1.5, "below")},
    }
    table = same_table(rows)
    assert re.findall(r"<td[^>]*>([^<]+)", table) == ["3.0x", "2.0x and more", "&lt; 1.5x"]
    assert same_table([row("old", 2.0, 45.0, None)]) == ""
