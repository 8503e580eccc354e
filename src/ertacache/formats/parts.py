"""Finished work that is not yet in its file: a folder of tensors by key, each file written whole.

What a killed process leaves there, the next one takes up. Values are plain safetensors files, and
large ones are read a row at a time. Knows nothing of what it keeps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, overload

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from ertacache.formats.files import DRAFT, draft

__all__ = ["Parts", "StoredRows", "decode", "encode"]

_KEY = re.compile("[0-9a-f]+")


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as bytes.

    Example:
        >>> import torch
        >>> decode(encode({"a": torch.tensor([1.5])}))
        {'a': tensor([1.5000])}
    """
    return save({name: value.contiguous() for name, value in tensors.items()})


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of some bytes."""
    return load(data)


class StoredRows(Sequence[Tensor]):
    """The rows of a tensor in a file, each read when it is used."""

    def __init__(self, path: Path, name: str, count: int) -> None:
        """Keep where the rows are."""
        self._path, self._name, self._count = path, name, count

    def __len__(self) -> int:
        """Number of rows."""
        return self._count

    @overload
    def __getitem__(self, row: int) -> Tensor: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, row: int | slice) -> Tensor | Sequence[Tensor]:
        """A row, or a list of them."""
        if isinstance(row, slice):
            return [self[k] for k in range(self._count)[row]]
        place = range(self._count)[row]
        with safe_open(self._path, "pt") as file:
            found: Tensor = file.get_slice(self._name)[place]
        return found


class Parts:
    """A folder of finished work; made with the first part, and removed when all is done.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     parts = Parts(Path(folder) / "policy.parts")
        ...     parts.save("0a", {"distances": torch.tensor([1.0, 2.0])})
        ...     parts.load("0a"), parts.load("0b")  # keys are hexadecimal numbers
        ({'distances': tensor([1., 2.])}, None)
    """

    def __init__(self, folder: str | PathLike[str], *, lasting: bool = False) -> None:
        """Keep the folder, which need not be there.

        ``lasting`` parts stay when the work is done: whoever made this object removes them, once
        what was made of them is safe.
        """
        self.folder, self.lasting = Path(folder), lasting

    def __fspath__(self) -> str:
        """The folder, so that parts can be given where it can."""
        return str(self.folder)

    def path(self, key: str) -> Path:
        """The file of a part."""
        return self.folder / f"{key}.safetensors"

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a part; one that is there is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: value.contiguous() for name, value in tensors.items()}
        with draft(self.path(key)) as place:
            save_file(contiguous, place)

    def load(self, key: str, *names: str) -> dict[str, Tensor] | None:
        """A part, or only some of its tensors; None if it is not there, or cannot be read."""
        with suppress(OSError, SafetensorError, KeyError, ValueError):
            if not names:
                return load_file(self.path(key))
            file: Any
            with safe_open(self.path(key), "pt") as file:
                return {name: file.get_tensor(name) for name in names}
        return None

    def rows(self, key: str, name: str) -> StoredRows | None:
        """The rows of one tensor of a part, None if it is not there."""
        file: Any
        with (
            suppress(OSError, SafetensorError, KeyError, ValueError),
            safe_open(self.path(key), "pt") as file,
        ):
            return StoredRows(self.path(key), name, file.get_slice(name).get_shape()[0])
        return None

    def remove(self) -> None:
        """Remove all parts, and the folder if nothing else is in it; other processes may, too."""
        with suppress(FileNotFoundError):  # glob would check the folder first, and then open it
            for path in list(self.folder.iterdir()):
                part = path.suffix == ".safetensors" and _KEY.fullmatch(path.stem)
                if part or path.name.startswith(DRAFT):  # of a process that was killed
                    path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()
