"""Rows by hand: medians, quartiles, intervals, and what stays empty; the files of results/."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.bench.journal import Record
from ertacache.bench.results import (
    BenchRow,
    Interval,
    largest_speedup,
    measured_row,
    read_results,
    write_results,
)
from tests.formats.faults import full_disk

FILES = sorted((Path(__file__).parents[2] / "results").glob("bench-*.json"))
EMPTY = BenchRow("m", "ours", 2.0, 30, compute_steps=15)
FULL = [Record("full", 1.0, k, seconds, {"psnr": [100.0]}) for k, seconds in enumerate((2.0, 4.0))]


def test_times_are_compared_batch_by_batch() -> None:
    ours = [
        Record("ours", 2.0, 1, 2.0, {"psnr": [30.0, 50.0], "ssim": [1.0, 1.0]}),
        Record("ours", 2.0, 0, 0.5, {"psnr": [40.0, 40.0], "ssim": [0.5, 0.5]}),
    ]
    row = measured_row(EMPTY, ours, FULL)
    assert row.speedup == Interval(3.0, 2.0, 4.0)  # the median of 4 / 2 and 2 / 0.5
    assert row.seconds == 1.25
    assert row.prompts == 4
    assert row.psnr is not None
    assert row.psnr.value == 40.0
    assert 30.0 <= row.psnr.low < 40.0 < row.psnr.high <= 50.0
    assert row.psnr_tenth == 33.0  # three tenths of the way from the worst to the next
    assert row.ssim is not None
    assert row.ssim.value == 0.75
    assert row.lpips is None
    assert row.flickering is None


def rows_at(*points: tuple[float, float, float]) -> list[BenchRow]:
    return [
        replace(EMPTY, psnr=Interval(mean, mean, mean), psnr_tenth=tenth, flops_ratio=1 / speedup)
        for speedup, mean, tenth in points
    ]


def test_the_largest_speedup_that_looks_the_same() -> None:
    # The mean would allow 3x; one prompt in ten is below 35 dB from 2.5x on.
    assert largest_speedup(rows_at((2, 50, 40), (4, 30, 20))) == (2.5, False)
    assert largest_speedup(rows_at((4, 30, 30), (2, 50, 45))) == (3.0, False)  # in any order
    assert largest_speedup(rows_at((2, 50, 40), (5, 41, 36))) == (5.0, True)
    # What comes back above the limit after it was below does not count.
    assert largest_speedup(rows_at((2, 50, 45), (3, 30, 30), (4, 45, 40))) == (2.5, False)
    assert largest_speedup(rows_at((2, 39, 38))) is None
    assert largest_speedup([EMPTY]) is None


def test_prompts_are_compared_with_ours_one_by_one() -> None:
    ours = [Record("trajectory", 2.0, k, 1.0, {"psnr": [60.0 - k, 40.0]}) for k in (1, 0)]
    baseline = [Record("baseline", 2.0, k, 1.0, {"psnr": [57.0 - k, 37.0]}) for k in (0, 1)]
    # Prompts differ by 20 dB, the two methods by 3 on every prompt.
    assert measured_row(EMPTY, baseline, FULL, ours).lead == Interval(3.0, 3.0, 3.0)
    assert measured_row(EMPTY, baseline, FULL).lead is None


def test_a_method_that_does_not_apply_has_a_reason(tmp_path: Path) -> None:
    silent = BenchRow("m", "T-GATE", 2.0, 30, why_not="no cross-attention")
    row = measured_row(silent, [], FULL)
    assert row.why_not == "no cross-attention"
    assert row.psnr is None
    write_results(tmp_path / "results.json", {"model": "m"}, [row])
    assert read_results(tmp_path / "results.json") == ({"model": "m"}, [silent])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_results_file_is_written_back_to_the_byte(path: Path, tmp_path: Path) -> None:
    settings, rows = read_results(path)
    assert any(row.psnr is not None and row.setting is not None for row in rows)
    write_results(tmp_path / path.name, settings, rows)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_there_are_results_files() -> None:
    assert len(FILES) >= 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"colour": 1}]}', '{"rows": [1]}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a results file"):
        read_results(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_results(tmp_path / "absent.json")


def test_a_full_disk_leaves_the_old_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for left in ([], [path]):
        with full_disk(), pytest.raises(OSError, match=r"results.json"):
            write_results(path, {"model": "m"}, [EMPTY])
        assert list(tmp_path.iterdir()) == left
        write_results(path, {"model": "m"}, [EMPTY])
    assert read_results(path) == ({"model": "m"}, [EMPTY])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("psnr_db", "40"),
        ("psnr_low", float("nan")),
        ("flops_ratio", "<b>"),
        ("fid", {}),
        ("knob", []),
        ("method", None),
        ("budget", True),
        ("steps", 1.5),
        ("extra", 1),
    ],
)
def test_a_results_file_that_was_edited_by_hand(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "bench.json"
    row = replace(EMPTY, psnr=Interval(40.0, 39.0, 41.0)).to_json()
    path.write_text(json.dumps({"rows": [row]}))
    read_results(path)
    path.write_text(json.dumps({"rows": [row | {key: value}]}))
    with pytest.raises(ValueError, match="is not a results file of `ertacache bench`"):
        read_results(path)
