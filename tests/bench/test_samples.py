"""Samples are read back as written, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from ertacache.bench.samples import SAMPLES, Samples, read_samples
from tests.formats.faults import full_disk


def test_round_trip_of_images_and_videos(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    first = Samples(path)
    first.add("full", 1.0, torch.ones(8, 3, 4, 4))
    first.add("full", 1.0, torch.zeros(2, 3, 4, 4), batch=1)
    first.save(["a", "b", "c", "d", "e"])
    again = Samples(path)  # as after an interruption
    videos = torch.linspace(-1, 2, 4)[:, None, None, None, None].expand(-1, -1, 3, -1, -1)
    again.add("DBCache | fast", 1.5, videos)
    again.save(["a", "b", "c", "d", "e"])
    prompts, found = read_samples(path)
    assert prompts == ["a", "b", "c", "d"]
    assert set(found) == {("full", 1.0), ("DBCache | fast", 1.5)}
    assert found["full", 1.0].shape == (SAMPLES, 3, 4, 4)
    assert found["full", 1.0].unique().tolist() == [255]
    assert found["DBCache | fast", 1.5][:, 0, 0].flatten().tolist() == [0, 0, 255, 255]


def test_all_images_are_stored_but_only_the_first_videos(tmp_path: Path) -> None:
    kept = Samples(tmp_path / "x.samples.safetensors", every=True)
    kept.add("full", 1.0, torch.ones(8, 3, 4, 4))
    assert kept.images("full", 1.0, batches=2) is None
    assert [kept.has("full", 1.0, batch=batch) for batch in (0, 1)] == [True, False]
    kept.add("full", 1.0, torch.zeros(2, 3, 4, 4), batch=1)
    found = kept.images("full", 1.0, batches=2)
    assert found is not None
    assert found.flatten(1).mean(1).tolist() == [1.0] * 8 + [0.0] * 2
    kept.add("video", 1.0, torch.ones(8, 5, 3, 4, 4))
    kept.add("video", 1.0, torch.ones(8, 5, 3, 4, 4), batch=1)
    assert kept.images("video", 1.0, batches=2) is None
    assert kept.images("video", 1.0, batches=1) is None
    assert [kept.has("video", 1.0, batch=batch) for batch in (0, 1)] == [True, True]


def test_without_fid_only_the_images_that_are_shown_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    kept = Samples(path)
    assert not kept.has("full", 1.0, batch=0)
    for batch in range(3):
        kept.add("full", 1.0, torch.ones(8, 3, 4, 4), batch=batch)
        assert kept.has("full", 1.0, batch=batch)
    kept.save(["a"])
    with safe_open(path, "pt") as file:
        assert {key: file.get_slice(key).get_shape()[0] for key in file.keys()} == {  # noqa: SIM118
            "1|0|full": SAMPLES
        }


def test_a_full_disk_leaves_the_old_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    kept = Samples(path, every=True)
    kept.add("full", 1.0, torch.ones(1, 3, 4, 4))
    kept.save(["a"])
    before = path.read_bytes()
    kept.add("full", 1.0, torch.ones(8, 3, 4, 4), batch=1)
    with full_disk(), pytest.raises(OSError, match=r"x.samples.safetensors"):
        kept.save(["a"])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_file_of_samples_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.samples.safetensors"
    samples = Samples(path)
    samples.add("full", 1.0, torch.rand(1, 3, 8, 8))
    samples.save(["a cat"])
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        whole[:40],
        b"{}" * 50,
        whole.replace(b"1|0|full", b"1_0_full"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="does not hold the samples of a benchmark: delete it"):
            read_samples(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="delete it"):
        Samples(path)
    path.write_bytes(save({"1|0|full": torch.rand(1, 3)}, metadata={"prompts": "[]"}))
    with pytest.raises(ValueError, match="no image and no video"):
        read_samples(path)
