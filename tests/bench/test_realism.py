"""FID against a folder of pictures, with features that a person can check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from ertacache.bench import realism
from ertacache.bench.realism import Realism, check_reference


def test_fid_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realism, "inception_features", lambda x: x.mean((2, 3))[:, :1])
    for name, level in (("a.png", 0), ("b.png", 255)):
        Image.new("RGB", (4, 4), (level, level, level)).save(tmp_path / name)
    judge = Realism(tmp_path)
    same = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 4, 4)
    assert judge.fid(same) == pytest.approx(0.0)
    assert judge.fid(same + 3) == pytest.approx(9.0)


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two pictures that FID needs"):
        check_reference(tmp_path)
