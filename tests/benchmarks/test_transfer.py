from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration.session import Session
from ertacache.formats.policy import PolicyError
from ertacache.models import MODELS

Load = Callable[[str], Any]


def test_every_setting_is_a_row(
    benchmark: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, path = benchmark("transfer"), tmp_path / "transfer.json"
    measured: list[Session] = []
    compared: list[list[str]] = []
    inner = transfer.measure

    def measure(session: Session, variants: list[Any], *args: Any) -> None:
        measured.append(session)
        compared.append([variant.name for variant in variants])
        if session.call["guidance_scale"] == 7.0:
            raise PolicyError("no guidance of 7")
        if session.call["guidance_scale"] == 5.0:
            warnings.warn("no plan is predicted to help", stacklevel=2)
        inner(session, variants, *args)

    monkeypatch.setattr(transfer, "measure", measure)
    small = ["--calibration", "2", "--heldout", "2", "--size", "48x32", "--results", str(path)]
    transfer.main(["flux", *small])
    rows = json.loads(path.read_text())
    assert [row["varied"] for row in rows] == ["guidance"] * 6 + ["size"] * 2 + ["batch"] * 2
    assert [row["guidance"] for row in rows[:6]] == [1.0, 2.0, 3.0, 3.5, 5.0, 7.0]
    assert [(row["height"], row["width"]) for row in rows[6:8]] == [(32, 32), (48, 32)]
    assert [row["batch_size"] for row in rows[8:]] == [1, 4]
    assert [row["calibrated"] for row in rows].count(True) == 3
    assert len(measured) == 8  # the calibrated setting stands in three lists and is measured once
    assert (measured[6].call["height"], measured[7].batch_size) == (48, 4)
    both = ["full", "psnr", "list", "fewer steps"]
    assert compared == [both] * 6 + [["full", "psnr", "fewer steps"]] * 2
    refused = {7.0: "no guidance of 7", 5.0: "no plan is predicted to help"}
    for row in rows:
        if row["guidance"] in refused:
            assert row["refused"] == refused[row["guidance"]]
            assert row["beats_fewer_steps"] is False
        else:
            assert row["beats_fewer_steps"] == (row["psnr_db"] > row["fewer_db"])
            assert row["prompts"] == 2
            assert {"list_db", "list_low", "list_high"} <= set(row) or row["varied"] != "guidance"
            assert row["varied"] == "guidance" or not any(key.startswith("list") for key in row)


def test_the_list_of_guidance_begins_with_the_models_own(benchmark: Load) -> None:
    transfer = benchmark("transfer")
    found = {name: transfer.guidance_list(model) for name, model in MODELS.items()}
    assert found == {
        "emoji-flux": [2.0, 5.0, 7.0],
        "emoji-wan": [5.0, 2.0, 7.0],
        "emoji-cogvideox": [6.0, 2.0, 5.0, 7.0],
        "emoji-opensora": [7.0, 2.0, 5.0],
    }
    for name, values in found.items():
        own = MODELS[name].guidance
        spanned = {value for value in (*transfer.GUIDANCE, own) if value != 1.0}
        assert (min(values), max(values)) == (min(spanned), max(spanned))


def test_the_page_says_where_it_is_ahead(benchmark: Load) -> None:
    benchmark("transfer")
    tables = import_module("tables")
    row = {"model": "m", "varied": "guidance", "guidance": 2.0, "height": 64, "width": 48}
    row |= {"batch_size": 1, "steps": 30, "compute_steps": 15, "prompts": 16, "calibrated": True}
    row |= {"psnr_db": 50.04, "psnr_low": 49.0, "psnr_high": 51.0, "beats_fewer_steps": True}
    row |= {"fewer_db": 40.0, "fewer_low": 39.0, "fewer_high": 41.0}
    table = tables.transfer_table([row])
    assert "ahead of fewer steps at every setting" in table
    assert "Calibrated at guidance 2, 64 x 48, batch 1; 15 of 30 steps" in table
    line = "| guidance | 2 | 64 x 48 | 1 | 50.0 (49.0 to 51.0) | 40.0 (39.0 to 41.0) | yes |"
    assert line in table
    worse = row | {"guidance": None, "beats_fewer_steps": False, "calibrated": False}
    refused = worse | {"refused": "so"}
    table = tables.transfer_table([row, worse, refused])
    assert "everywhere but at no guidance, 64 x 48, batch 1." in table
    assert "| guidance | none | 64 x 48 | 1 | refused | | no |" in table
    listed = row | {"list_db": 55.0, "list_low": 54.0, "list_high": 56.0}
    lines = tables.transfer_table([listed, row, refused]).splitlines()[-5:]
    assert len({line.count("|") for line in lines}) == 1  # as many cells in every line
    assert "| 50.0 (49.0 to 51.0) | 55.0 (54.0 to 56.0) | 40.0 (39.0 to 41.0) | yes |" in lines[2]
    assert tables.transfer_table([]) == "Not measured yet."
    with pytest.raises(ValueError, match="exactly one place"):
        tables.fill("transfer", "a page without", [])


def test_the_other_size(benchmark: Load) -> None:
    transfer = benchmark("transfer")
    assert transfer.other_size((64, 64)) == (48, 48)
    assert transfer.other_size((32, 32)) == (48, 48)
    assert transfer.other_size((64, 96)) == (48, 64)
