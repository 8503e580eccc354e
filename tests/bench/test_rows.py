"""Rows by hand: medians, quartiles, intervals, and what stays empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from ertacache.bench.records import Record
from ertacache.bench.rows import BenchRow, make_row, read_results, write_results

EMPTY = BenchRow("m", "ours", 2.0, 30, compute_steps=15)
FULL = [Record("full", 1.0, k, seconds, {"psnr": [100.0]}) for k, seconds in enumerate((2.0, 4.0))]


def test_times_are_compared_batch_by_batch() -> None:
    ours = [
        Record("ours", 2.0, 1, 2.0, {"psnr": [30.0, 50.0], "ssim": [1.0, 1.0]}),
        Record("ours", 2.0, 0, 0.5, {"psnr": [40.0, 40.0], "ssim": [0.5, 0.5]}),
    ]
    row = make_row(EMPTY, ours, FULL)
    assert row["speedup"] == 3.0  # the median of 4 / 2 and 2 / 0.5
    assert (row["speedup_low"], row["speedup_high"]) == (2.0, 4.0)
    assert row["seconds"] == 1.25
    assert row["prompts"] == 4
    assert row["psnr_db"] == 40.0
    assert 30.0 <= row["psnr_low"] < 40.0 < row["psnr_high"] <= 50.0
    assert row["ssim"] == 0.75
    assert row["lpips"] is None
    assert row["flickering"] is None


def test_prompts_are_compared_with_ours_one_by_one() -> None:
    ours = [Record("trajectory", 2.0, k, 1.0, {"psnr": [60.0 - k, 40.0]}) for k in (1, 0)]
    rival = [Record("rival", 2.0, k, 1.0, {"psnr": [57.0 - k, 37.0]}) for k in (0, 1)]
    row = make_row(EMPTY, rival, FULL, ours)
    # Prompts differ by 20 dB, the two methods by 3 on every prompt.
    assert (row["lead_db"], row["lead_low"], row["lead_high"]) == (3.0, 3.0, 3.0)
    assert make_row(EMPTY, rival, FULL)["lead_db"] is None


def test_a_method_that_cannot_take_part_keeps_its_reason(tmp_path: Path) -> None:
    silent = BenchRow("m", "T-GATE", 2.0, 30, why_not="no cross-attention")
    row = make_row(silent, [], FULL)
    assert row["why_not"] == "no cross-attention"
    assert row["psnr_db"] is None
    write_results(tmp_path / "results.json", {"model": "m"}, [row])
    assert read_results(tmp_path / "results.json") == ({"model": "m"}, [silent])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"colour": 1}]}', '{"rows": [1]}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no results file"):
        read_results(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_results(tmp_path / "absent.json")
