"""Samples are read back as written, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ertacache.bench.samples import SAMPLES, Samples, read_samples
from tests.formats.faults import full_disk


def test_round_trip_of_images_and_videos(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    first = Samples(path)
    first.add("full", 1.0, torch.ones(8, 3, 4, 4))
    first.add("full", 1.0, torch.zeros(2, 3, 4, 4), batch=1)
    first.save(["a", "b", "c", "d", "e"])
    again = Samples(path)  # as after an interruption
    again.add("DBCache | fast", 1.5, torch.linspace(-1, 2, 4)[:, None, None, None, None])
    again.save(["a", "b", "c", "d", "e"])
    prompts, found = read_samples(path)
    assert prompts == ["a", "b", "c", "d"]
    assert set(found) == {("full", 1.0), ("DBCache | fast", 1.5)}
    assert found["full", 1.0].shape == (SAMPLES, 3, 4, 4)
    assert found["full", 1.0].unique().tolist() == [255]
    assert found["DBCache | fast", 1.5].flatten().tolist() == [0, 0, 255, 255]


def test_all_images_are_stored_but_only_the_first_videos(tmp_path: Path) -> None:
    kept = Samples(tmp_path / "x.samples.safetensors")
    kept.add("full", 1.0, torch.ones(8, 3, 4, 4))
    assert kept.images("full", 1.0, batches=2) is None
    kept.add("full", 1.0, torch.zeros(2, 3, 4, 4), batch=1)
    found = kept.images("full", 1.0, batches=2)
    assert found is not None
    assert found.flatten(1).mean(1).tolist() == [1.0] * 8 + [0.0] * 2
    kept.add("video", 1.0, torch.ones(8, 5, 3, 4, 4))
    kept.add("video", 1.0, torch.ones(8, 5, 3, 4, 4), batch=1)
    assert kept.images("video", 1.0, batches=2) is None
    assert kept.images("video", 1.0, batches=1) is None


def test_a_full_disk_leaves_the_old_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    kept = Samples(path)
    kept.add("full", 1.0, torch.ones(1, 3, 4, 4))
    kept.save(["a"])
    before = path.read_bytes()
    kept.add("full", 1.0, torch.ones(8, 3, 4, 4), batch=1)
    with full_disk(), pytest.raises(OSError, match=r"x.samples.safetensors"):
        kept.save(["a"])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
