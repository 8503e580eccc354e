"""The table of the ComfyUI pack."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.benchmarks.conftest import FOLDER


@pytest.fixture
def comfytables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("comfytables")


def row(method: str, computed: int, psnr: float, sampler: str = "euler") -> dict[str, Any]:
    spread = {"psnr_low": psnr - 1, "psnr_high": psnr + 1}
    cost = {"computed": computed, "calls": float(computed)}
    return {"method": method, "sampler": sampler, "psnr_db": psnr} | cost | spread


def test_every_method_has_a_line(comfytables: Any) -> None:
    methods = {"ERTACache": 60.0, "EasyCache": 40.0, "LazyCache": 45.0, "fewer steps": 48.0}
    rows = [row(name, n, psnr - n) for name, psnr in methods.items() for n in (15, 10)]
    rows += [row("ERTACache", n, 50.0, "uni_pc") for n in (15, 10)]
    table = comfytables.comfyui_table(
        {
            "model": "emoji-flux",
            "comfyui": "0.30.0",
            "steps": 30,
            "calibration_prompts": 8,
            "prompts": 16,
            "rows": rows,
            "pipeline": [{"computed": 15, "psnr_db": 61.0}],
            "all_steps": [{"sampler": "euler", "equal": True}, {"sampler": "x", "equal": False}],
            "exchange": [{"lowest_db": 71.6, "prompts": 4}, {"lowest_db": 70.2, "prompts": 4}],
        }
    )
    assert (
        "| **ERTACache** | euler | 45.0 (44.0 to 46.0) | 15 | 50.0 (49.0 to 51.0) | 10 |" in table
    )
    assert "| **ERTACache** | uni_pc | 50.0 (49.0 to 51.0) | 15 |" in table
    assert "| EasyCache | euler | 25.0 (24.0 to 26.0) | 15 |" in table
    assert "reaches 61.0 dB at 15 computed steps" in table
    assert "ComfyUI's own: euler. A policy" in table
    assert "at least 70 dB between the two on 4 prompts" in table


def test_nothing_was_measured_yet(comfytables: Any) -> None:
    assert comfytables.comfyui_table([]) == "Not measured yet."
