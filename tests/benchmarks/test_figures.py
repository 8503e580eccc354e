"""The figures' benchmarks on tiny pipelines, and their page from rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

Load = Callable[[str], Any]


def places(folder: Path) -> list[str]:
    return ["--results", str(folder / "rows.json"), "--images", str(folder)]


def test_choices_share_no_prompt(benchmark: Load) -> None:
    choose = benchmark("sensitivity").choose
    for number, count in ((1, 3), (16, 3), (32, 2), (64, 1)):
        found = choose(64, number, 3)
        assert [len(choice) for choice in found] == [number] * count
        assert len({k for choice in found for k in choice}) == number * count
        assert found == choose(64, number, 3)


def test_sensitivity_is_written_number_by_number(
    benchmark: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sensitivity = benchmark("sensitivity")
    path = tmp_path / "rows.json"
    kept = {"model": "flux", "steps": 8, "method": "older", "budget": 2, "prompts": 64}
    path.write_text(json.dumps([kept, kept | {"prompts": 1}, {"model": "x", "prompts": 1}]))
    small = ["--numbers", "1", "2", "--choices", "2", "--heldout", "2", "--batch", "2"]
    sensitivity.main(["flux", *small, *places(tmp_path)])
    rows = json.loads(path.read_text())
    assert {"model": "x", "prompts": 1} in rows
    mine = [row for row in rows if row["model"] == "flux"]
    assert mine.pop() == kept
    assert {(row["prompts"], row["method"]) for row in mine} == {
        (0, "fewer steps"),
        *((number, name) for number in (1, 2) for name in ("paper", "trajectory, no refit")),
        (2, "trajectory"),
    }
    assert {row["budget"] for row in mine} == {2, 4}
    for row in mine:
        assert row["psnr_low"] <= row["psnr_db"] <= row["psnr_high"]
        several = row["method"] in ("paper", "trajectory, no refit")
        assert len(row["choices_db"]) == len(row["computed"]) == (2 if several else 1)
    assert (tmp_path / "sensitivity-flux.png").exists()
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])) == len(rows) - 1


def test_curves_see_every_step_of_every_prompt(
    benchmark: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = benchmark("curves")
    small = ["--calibration", "2", "--heldout", "3", "--batch", "2"]
    curves.main(["flux", "wan", *small, *places(tmp_path)])
    assert "wan: diffusers has no metadata" in capsys.readouterr().out  # it has one block only
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["prompts"] == 3
    for name in ("residual", "output", "estimate"):
        for values in row[name].values():
            assert len(values) == row["steps"] - 1
        assert all(a <= b for a, b in zip(row[name]["low"], row[name]["high"], strict=True))
    assert (tmp_path / "curves-flux.png").exists()
    text = import_module("figuretables").curves_table([row])
    assert "3 held-out prompts" in text
    assert "| TeaCache's estimate and the residual |" in text


def test_changes_by_hand(benchmark: Load) -> None:
    curves = benchmark("curves")
    # Two prompts, both branches of guidance in one batch: the last two count.
    one, two = torch.tensor([9.0, 9.0, 1.0, 2.0]), torch.tensor([9.0, 9.0, 2.0, 2.0])
    assert curves.changes([one[:, None], two[:, None]], 2).tolist() == [[1.0], [0.0]]
    line, flat = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    assert curves.correlation(line, -2 * line).item() == pytest.approx(-1.0)
    assert curves.correlation(line, flat).item() == 0.0


def test_error_maps_of_images_and_videos(benchmark: Load, tmp_path: Path) -> None:
    errormaps = benchmark("errormaps")
    small = ["--calibration", "2", "--prompts", "2", "--batch", "2"]
    errormaps.main(["flux", "wan", *small, *places(tmp_path)])
    flux, wan = json.loads((tmp_path / "rows.json").read_text())
    assert [one["method"] for one in flux["methods"]] == [
        "trajectory",
        "paper",
        "TeaCache",
        "fewer steps",
    ]
    assert (len(flux["prompts"]), flux["frames"]) == (2, None)
    assert (len(wan["prompts"]), wan["frames"]) == (1, 3)
    assert (tmp_path / "error-maps-flux.png").exists()
    text = import_module("figuretables").errormaps_table([flux, wan])
    assert "Held-out prompts, 3 frames of each, from left to right: “a small red circle”." in text
    assert "Differences are amplified 16 times." in text


def test_the_page_of_sensitivity(benchmark: Load) -> None:
    benchmark("sensitivity")
    tables = import_module("figuretables")
    row = {"model": "m", "steps": 30, "method": "paper", "budget": 15, "prompts": 1, "heldout": 32}
    row |= {"psnr_db": 40.0, "psnr_low": 39.0, "psnr_high": 41.0, "choices_db": [38.0, 42.0]}
    more = row | {"prompts": 64, "psnr_db": 45.0, "choices_db": [45.0]}
    fewer = more | {"method": "fewer steps", "prompts": 0}
    text = tables.sensitivity_table([row, more, fewer])
    assert (
        "Paper: 40.0 dB with 1 prompt, 45.0 dB with 64 prompts; choices of equally many prompts "
        "differ by 4.0 dB at most (with 1 prompt)." in text
    )
    assert "| 1 | 40.0 (39.0 to 41.0) | 38.0 to 42.0 |  |" in text
    assert "| none |  |  | 45.0 (39.0 to 41.0) |" in text
    assert tables.sensitivity_table([]) == "Not measured yet."


def test_when_the_estimate_diverges(benchmark: Load) -> None:
    benchmark("curves")
    tables = import_module("figuretables")
    assert "here it is less accurate early" in tables.divergence(1.5, 0.9)
    assert "As in the paper's figure" in tables.divergence(1.5, 0.5)


def test_rows_below_the_ideal_are_listed(benchmark: Load) -> None:
    benchmark("sensitivity")
    tables = import_module("figuretables")
    row = {"method": "paper", "compute_steps": 10, "percent_of_ideal": 95.0}
    assert tables.shortfall([row]) == "All reach 95 % of the ideal."
    low = row | {"percent_of_ideal": 94.94}
    expected = "Below 95 % of the ideal: paper with 10 computed steps (94.9 %)."
    assert tables.shortfall([row, low]) == expected
