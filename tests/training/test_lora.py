"""The LoRA for the check of changed models: a few steps, loaded into the bundled pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ertacache.cli.loading import load_lora
from ertacache.models import load_pipeline
from training import lora
from training.subjects import SUBJECTS


@pytest.fixture(autouse=True)
def _no_font(monkeypatch: pytest.MonkeyPatch) -> None:
    """Glyphs of noise, so that no font has to be there."""
    glyphs = torch.rand(len(SUBJECTS), 4, 72, 72, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("training.data._glyphs", lambda: glyphs)


def test_a_few_steps_are_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "BATCH", 2)
    losses = lora.train_lora(tmp_path, steps=3, count=4)
    assert len(losses) == 3
    assert all(torch.tensor(losses).isfinite())
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]
    pipe = load_pipeline("emoji-flux")
    call = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": 16}

    def run() -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        made: torch.Tensor = pipe("a cat", generator=noise, output_type="latent", **call).images
        return made

    before = run()
    load_lora(pipe, str(tmp_path))
    assert not torch.equal(run(), before)
