from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Load = Callable[[str], Any]
SMALL = ["--calibration", "2", "--heldout", "2", "--batch", "2"]
FIELDS = {
    "model",
    "method",
    "steps",
    "compute_steps",
    "psnr_db",
    "psnr_low",
    "psnr_high",
    "ssim",
    "speedup",
    "prompts",
}
PREDICTION = {
    "model",
    "steps",
    "compute_steps",
    "predicted_rmse",
    "measured_rmse",
    "ratio",
    "predicted_psnr_db",
    "prompts",
}


def test_all_methods_of_several_models(
    benchmark: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fidelity, path = benchmark("fidelity"), tmp_path / "fidelity.json"
    old = {"model": "flux", "method": "older"}, {"model": "elsewhere", "method": "kept"}
    path.write_text(json.dumps(old))
    fidelity.main([*SMALL, "--results", str(path)])
    rows = json.loads(path.read_text())
    assert rows.pop() == old[1]  # models of their own come last
    assert list(dict.fromkeys(row["model"] for row in rows)) == ["flux", "wan"]
    distances = {"predicted_rmse", "measured_rmse"}
    for row in rows:
        predicted = distances if row["method"] == "trajectory, no refit" else set()
        assert set(row) == FIELDS | predicted
    parts = ("", ", no timesteps", ", policy only")
    papers = {f"{title}{part}" for title in ("paper", fidelity.NETWORK) for part in parts}
    papers.add(f"{fidelity.NETWORK}, no timesteps, K and B per element")
    for model in ("flux", "wan"):
        methods = [row["method"] for row in rows if row["model"] == model]
        assert set(methods) == papers | {
            "trajectory",
            "trajectory, no refit",
            "plain reuse",
            "fewer steps",
        }
        assert len(methods) == 2 * 11
        mine = [row for row in rows if row["model"] == model]
        assert len({(row["method"], row["compute_steps"]) for row in mine}) == 2 * 11
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(map(str, printed)) == sorted(map(str, rows))
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    budgets = {"flux": [5, 4, 2], "wan": [4, 3, 2]}  # 1.5x, 2x, 3x; the tiny ones have no more
    for model, expected in budgets.items():
        found = {row["compute_steps"]: row for row in predictions if row["model"] == model}
        assert list(found) == expected
        assert all(set(row) == PREDICTION for row in found.values())
        for row in found.values():
            ratio = row["measured_rmse"] / row["predicted_rmse"]
            assert row["ratio"] == pytest.approx(ratio, rel=1e-3)
        for row in rows:
            if (row["model"], row["method"]) == (model, "trajectory, no refit"):
                mine = found[row["compute_steps"]]
                assert {row[key] == mine[key] for key in distances} == {True}


def test_one_model_is_measured_again(benchmark: Load, tmp_path: Path) -> None:
    fidelity, path = benchmark("fidelity"), tmp_path / "fidelity.json"
    kept = {"model": "flux", "method": "trajectory", "compute_steps": 9, "psnr_db": 1.0}
    path.write_text(json.dumps([{"model": "wan"}, kept, kept | {"method": "paper"}]))
    fidelity.main(["flux", *SMALL, "--methods", "paper", "--results", str(path)])
    rows = json.loads(path.read_text())
    assert rows.pop() == {"model": "wan"}
    assert rows.pop(0) == kept  # not measured again, unlike the paper's
    assert {row["model"] for row in rows} == {"flux"}
    assert {row["compute_steps"] for row in rows} <= {2, 3, 4}
    assert not (tmp_path / "predictions.json").exists()  # only ours predicts
    with pytest.raises(SystemExit):
        fidelity.main(["no-model"])
