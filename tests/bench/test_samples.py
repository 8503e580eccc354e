"""Samples survive the file, and an interruption."""

from __future__ import annotations

from pathlib import Path

import torch

from ertacache.bench.samples import SAMPLES, Samples, read_samples


def test_round_trip_of_pictures_and_videos(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    first = Samples(path)
    first.add("full", 1.0, torch.ones(8, 3, 4, 4))
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
