"""Published weights: located, checked, loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ertacache.models.opensora import AutoencoderKLOpenSora, OpenSoraTransformer3DModel
from tests.models.opensora.small import AUTOENCODER, TRANSFORMER, autoencoder, transformer

PUBLISHED = {  # the names of the public configuration
    "hidden_size": 48,
    "num_heads": 4,
    "depth": 2,
    "caption_channels": 24,
    "model_max_length": 9,
    "input_sq_size": 64,
    "in_channels": 4,
    "pred_sigma": True,
    "patch_size": [1, 2, 2],
    "qk_norm": True,
    "mlp_ratio": 4.0,
    "enable_flash_attn": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(transformer().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    return tmp_path


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    states = a.state_dict(), b.state_dict()
    return all(torch.equal(states[0][key], states[1][key]) for key in states[0] | states[1])


def test_folder_with_its_configuration(folder: Path) -> None:
    network = OpenSoraTransformer3DModel.from_original(folder)
    assert equal(network, transformer())
    assert dict(network.config)["num_attention_heads"] == 4
    assert not network.training
    assert not network.rope.freqs.requires_grad


def test_file_without_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    file = folder / "model.safetensors"
    assert equal(OpenSoraTransformer3DModel.from_original(file, **TRANSFORMER), transformer())


def test_weights_in_several_files(folder: Path) -> None:
    state = transformer().state_dict()
    for part, keys in enumerate((sorted(state)[:20], sorted(state)[20:])):
        save_file({key: state[key] for key in keys}, folder / f"model-{part}.safetensors")
    (folder / "model.safetensors").unlink()
    assert equal(OpenSoraTransformer3DModel.from_original(folder), transformer())


def test_precision(folder: Path) -> None:
    network = OpenSoraTransformer3DModel.from_original(folder, dtype=torch.bfloat16)
    assert {value.dtype for value in network.state_dict().values()} == {torch.bfloat16}


def test_autoencoder(tmp_path: Path) -> None:
    save_file(autoencoder().state_dict(), tmp_path / "model.safetensors")
    published = {"micro_frame_size": 9, "vae_2d": {"type": "x", "micro_batch_size": 2}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    vae = AutoencoderKLOpenSora.from_original(tmp_path, **AUTOENCODER)
    assert equal(vae, autoencoder())
    assert vae.config["micro_frame_size"] == 9
    assert vae.config["micro_batch_size"] == 2


def test_other_weights_are_refused(folder: Path) -> None:
    state = transformer().state_dict()
    state["strange"] = state.pop("t_block.1.bias")
    state["t_block.1.weight"] = state["t_block.1.weight"][:3].clone()
    save_file(state, folder / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"are not those of OpenSoraTransformer3DModel: 1 missing \(such as t_block.1.bias\), "
        r"1 unknown \(such as strange\), 1 of another shape \(such as t_block.1.weight\)",
    ):
        OpenSoraTransformer3DModel.from_original(folder)


def test_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"contains no \.safetensors file"):
        OpenSoraTransformer3DModel.from_original(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a file, nor a folder, nor a hub id"):
        OpenSoraTransformer3DModel.from_original(tmp_path / "absent")
