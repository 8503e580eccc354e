"""Sizes that cannot be made, and the memory that a size takes at least."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ertacache.integration import sizes
from ertacache.integration.sizes import available_memory, check_size, differing_size, needed_memory

CPU = torch.device("cpu")


def pipeline(**changes: Any) -> Any:
    """A pipeline by its attributes: 8 pixels a latent, 2 x 2 latents a token."""
    network = {"num_attention_heads": 2, "attention_head_dim": 16, "patch_size": 2}
    return SimpleNamespace(
        **{
            "device": CPU,
            "vae_scale_factor": 8,
            "transformer": SimpleNamespace(config=network, dtype=torch.bfloat16),
            "vae": SimpleNamespace(config={"block_out_channels": [32, 64]}, dtype=torch.float16),
        }
        | changes
    )


def test_the_memory_of_an_image_is_that_of_its_decoder() -> None:
    size = {"height": 128, "width": 64}
    # The result in float32, and input and output of a layer of 32 channels in float16.
    assert needed_memory(pipeline(), size) == 128 * 64 * (3 * 4 + 2 * 32 * 2)
    # 8 x 4 tokens of 32 channels in bfloat16, six times.
    assert needed_memory(pipeline(), size, decoded=False) == 8 * 4 * 32 * 2 * 6


def test_the_memory_of_a_video_grows_with_its_frames() -> None:
    vae = SimpleNamespace(config={"base_dim": 10, "patch_size": 2}, dtype=torch.float32)
    config = {"num_attention_heads": 1, "attention_head_dim": 8, "patch_size": [1, 2, 2]}
    network = SimpleNamespace(config=config, dtype=torch.float32)
    pipe = pipeline(vae=vae, transformer=network, vae_scale_factor_temporal=4)
    size = {"height": 16, "width": 16, "num_frames": 81}
    assert needed_memory(pipe, size) == 256 * (3 * 81 * 4 + 2 * 10 * 4 // 4)
    assert needed_memory(pipe, size, decoded=False) == 21 * 8 * 4 * 6


def test_what_a_pipeline_does_not_say_counts_nothing() -> None:
    size = {"height": 16, "width": 16}
    bare = SimpleNamespace(device=CPU)
    assert needed_memory(bare, size) == 256 * 3 * 4
    assert needed_memory(bare, {"height": 16}) == 0
    assert needed_memory(bare, {"height": [16, 32], "width": 16}) == 512 * 3 * 4
    tiled = SimpleNamespace(config={"block_out_channels": [512]}, dtype=torch.float32)
    tiled.use_tiling = True
    assert needed_memory(pipeline(vae=tiled), size) == 256 * 3 * 4


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"height": 128, "width": 64}
    needed = needed_memory(pipeline(), size)
    monkeypatch.setattr(sizes, "available_memory", lambda device: needed)
    check_size(pipeline(), size)
    monkeypatch.setattr(sizes, "available_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"128 x 64 pixels need at least 0\.0 GB of memory, and"):
        check_size(pipeline(), size)
    check_size(pipeline(), size, decoded=False)
    monkeypatch.setattr(sizes, "available_memory", lambda device: None)
    check_size(pipeline(), size)


def test_a_size_below_one_latent_is_refused() -> None:
    check_size(pipeline(), {"height": 8, "width": 8})
    with pytest.raises(ValueError, match="width 7 is too small: SimpleNamespace works on a grid"):
        check_size(pipeline(), {"height": 8, "width": 7})
    with pytest.raises(ValueError, match="height 4 is too small"):
        check_size(pipeline(), {"height": [8, 4], "width": 8})


def test_a_container_bounds_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = available_memory(CPU)
    assert free is None or free > 0
    limit, unlimited = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("123456\n")
    unlimited.write_text("max\n")
    monkeypatch.setattr(sizes, "_CGROUPS", (limit, unlimited, tmp_path / "absent"))
    assert available_memory(CPU) == 123456
    assert available_memory(torch.device("meta")) is None


def test_a_result_of_another_size_is_reported() -> None:
    asked = {"height": 65, "width": 64, "num_frames": 6}
    assert differing_size((3, 65, 64), asked) is None
    found = differing_size((5, 3, 64, 64), asked)
    assert found == "the pipeline made height 64 instead of 65, num_frames 5 instead of 6"
    assert differing_size((5, 3, 64, 64), {}) is None
