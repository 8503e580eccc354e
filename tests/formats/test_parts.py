"""Finished work in a folder: whole files, read a row at a time, and nothing else is removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from ertacache.formats.files import DRAFT
from ertacache.formats.parts import Parts, decode, encode


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "policy.parts")


def test_a_part_comes_back_to_the_bit(parts: Parts) -> None:
    value = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double().mT
    parts.save("0f", {"a": value, "b": torch.tensor([1, 2])})
    found = parts.load("0f")
    assert found is not None
    assert torch.equal(found["a"], value)
    assert parts.load("0f", "b")["b"].tolist() == [1, 2]  # type: ignore[index]
    assert torch.equal(decode(encode({"a": value}))["a"], value)


def test_what_is_not_there_is_none(parts: Parts) -> None:
    assert parts.load("0f") is parts.rows("0f", "a") is None
    parts.save("0f", {"a": torch.zeros(1)})
    assert parts.load("0f", "b") is parts.rows("0f", "b") is None
    parts.path("0f").write_bytes(b"damaged")  # it is done again
    assert parts.load("0f") is parts.rows("0f", "a") is None


def test_rows_are_read_one_at_a_time(parts: Parts) -> None:
    value = torch.arange(12.0).view(4, 3).bfloat16()
    parts.save("0f", {"latents": value})
    rows = parts.rows("0f", "latents")
    assert rows is not None
    assert len(rows) == 4
    assert torch.equal(rows[1], value[1])
    assert torch.equal(rows[-1], value[-1])
    assert torch.equal(torch.stack(list(rows[1:3])), value[1:3])
    with pytest.raises(IndexError):
        rows[4]


def test_only_parts_are_removed(parts: Parts) -> None:
    parts.remove()  # nothing is there yet
    parts.save("0f", {"a": torch.zeros(1)})
    parts.remove()
    assert not parts.folder.exists()
    parts.save("0f", {"a": torch.zeros(1)})
    mine = parts.folder / "my-policy.safetensors"
    mine.write_bytes(b"mine")
    parts.remove()
    assert list(parts.folder.iterdir()) == [mine]


def test_another_process_removes_the_parts_meanwhile(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a launch remove what they share, at the same moment."""
    listed = os.listdir

    def gone(folder: Path) -> list[str]:
        shutil.rmtree(folder)
        return listed(folder)

    parts.save("0f", {"a": torch.zeros(1)})
    monkeypatch.setattr(os, "listdir", gone)  # the folder is gone when it is opened
    parts.remove()
    monkeypatch.setattr(os, "listdir", lambda folder: [*listed(folder), "0e.safetensors"])
    parts.save("0f", {"a": torch.zeros(1)})
    parts.remove()  # a file is gone when it is unlinked
    assert not parts.folder.exists()


def test_drafts_of_a_killed_process_go_too(parts: Parts) -> None:
    parts.save("0f", {"a": torch.zeros(1)})
    (parts.folder / f"{DRAFT}12ab.safetensors").touch()
    parts.remove()
    assert not parts.folder.exists()


def test_a_part_can_be_given_where_a_folder_can(parts: Parts) -> None:
    assert os.fspath(parts) == str(parts.folder)
