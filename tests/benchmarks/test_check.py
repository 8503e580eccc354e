"""The benchmark of changed models: its rows on tiny pipelines, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model_state_dict

from tests.integration.tiny import CASES

Load = Callable[[str], Any]


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """The folder of a LoRA for the tiny Flux, its weights at random."""
    pipe = CASES["flux"].build()
    layers = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.transformer.add_adapter(layers)
    pipe.save_lora_weights(tmp_path / "lora", get_peft_model_state_dict(pipe.transformer))
    return tmp_path / "lora"


def test_every_change_has_its_rows(
    lora: Path,
    benchmark: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = benchmark("check")
    monkeypatch.setattr(module, "MODEL", "flux")
    monkeypatch.setattr(module, "quantize", lambda pipe: None)  # torchao need not be there
    monkeypatch.setattr(module, "COMPARED", 1)
    output = tmp_path / "check.json"
    module.main([str(lora), "--prompts", "2", "--calibration", "2", "-o", str(output)])
    rows = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == rows
    names = ["nothing", "LoRA", "int8 weights", "bfloat16", "guidance 7"]
    assert list(dict.fromkeys(row["change"] for row in rows)) == names
    assert {row["prompts"] for row in rows} == {2}
    first, lora_row = rows[0], next(row for row in rows if row["change"] == "LoRA")
    assert first["change_db"] is None
    assert first["lost_db"] == pytest.approx(0, abs=0.1)  # the validation, repeated
    assert lora_row["change_db"] < 100
    table = import_module("tables").check_table(rows)
    assert f"| nothing |  | {first['computed_steps']} of {first['num_steps']} |" in table
    assert "2 held-out prompts." in table


def test_the_sentence_on_losses(benchmark: Load) -> None:
    benchmark("check")
    losses = import_module("tables").losses
    row = {"change": "LoRA", "computed_steps": 10, "failed": False}
    assert losses([row]) == "No change costs more than 6 dB."
    assert "lost with LoRA at 10 steps: " in losses([row, row | {"failed": True}])
