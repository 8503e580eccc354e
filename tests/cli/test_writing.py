"""Where results may go, how they are called, and the files themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ertacache.cli.writing import find_destination, side_by_side, slug, write
from tests.cli.conftest import Refused, T


def test_the_destination_of_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    assert find_destination(tmp_path / "a.png", results=1, video=False).single
    assert not find_destination(tmp_path / "folder.png", results=1, video=False).single
    assert not find_destination(tmp_path / "v1.2", results=1, video=False).single
    for name, results, video in (
        ("a.png", 2, False),
        ("a.png", 1, True),
        ("a.mp4", 1, False),
        ("a.jpg", 1, False),
        ("file", 1, False),
    ):
        with pytest.raises(ValueError, match=name):
            find_destination(tmp_path / name, results=results, video=video)


@pytest.mark.parametrize("text", ["..", "/etc/passwd", "a" * 500, "", "con\0", "Ünï\u202e"])
def test_slugs_are_safe(text: str) -> None:
    assert slug(text).replace("-", "").isalnum()
    assert slug(text).isascii()
    assert len(slug(text)) <= 40


def test_side_by_side() -> None:
    full, fast = torch.zeros(3, 2, 2), torch.full((3, 2, 2), 0.1)
    row = side_by_side(full, fast)
    assert row.shape == (3, 2, 6)
    assert row[0, 0].tolist() == pytest.approx([0, 0, 0.1, 0.1, 0.8, 0.8])


def test_a_video_of_odd_size_and_a_result_that_is_not_a_number(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    write(torch.rand(3, 3, 19, 35), tmp_path / "odd.mp4")
    assert (tmp_path / "odd.mp4").stat().st_size > 0
    write(torch.full((3, 4, 4), torch.nan), tmp_path / "nan.png")
    assert np.asarray(Image.open(tmp_path / "nan.png")).max() == 0


def test_no_other_file_is_overwritten(tmp_path: Path, policy_file: Path, refused: Refused) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert "will not overwrite" in refused("profile", "emoji-flux", "-o", notes)
    assert notes.read_text() == "mine"
    before, options = policy_file.read_bytes(), ["--limit", 4, "--steps", T]
    line = refused("profile", "emoji-flux", *options, "-o", policy_file)
    assert "holds fitted plans, which would be lost" in line
    assert policy_file.read_bytes() == before
    assert "it is a folder" in refused("profile", "emoji-flux", "-o", tmp_path)
    assert "there is no folder" in refused("profile", "emoji-flux", "-o", tmp_path / "a" / "b")
