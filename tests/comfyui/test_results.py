"""What the results file of the ComfyUI pack must show, whatever the weights of the model."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = json.loads((Path(__file__).parents[2] / "results" / "comfyui.json").read_text())


def psnr(method: str, sampler: str, computed: int) -> float:
    (row,) = [
        row
        for row in RESULTS["rows"]
        if (row["method"], row["sampler"], row["computed"]) == (method, sampler, computed)
    ]
    return float(row["psnr_db"])


def test_comfyui_reaches_what_the_pipeline_reaches() -> None:
    for row in RESULTS["pipeline"]:
        assert psnr("ERTACache", "euler", row["computed"]) >= row["psnr_db"] - 1


def test_all_steps_computed_is_the_sampler_itself() -> None:
    assert {row["sampler"] for row in RESULTS["all_steps"]} == {"euler", "dpmpp_2m", "uni_pc"}
    assert all(row["equal"] for row in RESULTS["all_steps"])


def test_policies_are_exchanged_with_diffusers() -> None:
    assert {row["calibrated_in"] for row in RESULTS["exchange"]} == {"ComfyUI", "diffusers"}
    assert all(row["lowest_db"] >= 45 for row in RESULTS["exchange"])


def test_others_were_measured_at_the_same_cost() -> None:
    for row in RESULTS["rows"]:
        assert abs(row["calls"] - row["computed"]) <= 1, row
        if row["method"] != "ERTACache":
            assert psnr("ERTACache", "euler", row["computed"]) > row["psnr_db"]
