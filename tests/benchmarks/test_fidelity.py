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
    assert all(set(row) == FIELDS for row in rows)
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
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(map(str, printed)) == sorted(map(str, rows))


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
    with pytest.raises(SystemExit):
        fidelity.main(["no-model"])
