"""Putting a trained model together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ertacache.models import MODELS
from training import assemble


def test_an_autoencoder_that_is_there_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(assemble, "load_ema", lambda modules, folder: loaded.append(folder))
    folder = MODELS["emoji-flux"].folder
    pipe = assemble.build("emoji-flux", tmp_path, folder)
    assert loaded == [tmp_path / "emoji-flux"]
    kept = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    found = pipe.vae.state_dict()
    assert all(torch.equal(found[name], value.float()) for name, value in kept.items())
    assert not pipe.vae.training
