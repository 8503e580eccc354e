"""The container of a policy file: safetensors with one canonical JSON string in its header.

Writes the same bytes for the same content, and reads nothing that it has not checked. Knows fields
and tensors, not what they mean; ``docs/formats.md`` is the specification.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from ertacache.formats.schema import FormatError, canonical, parse_object

__all__ = ["Document", "open_document", "open_regular", "pack"]

MAX_FILE_BYTES = 256 << 20
MAX_HEADER_BYTES = 4 << 20
METADATA_KEY = "ertacache"
_SEAL = '{{"checksum":"{}",'  # how the string begins; "checksum" sorts before all other keys
_SEAL_LENGTH = len(_SEAL.format("0" * 64))
FORMAT = "ertacache-policy"
VERSION = 2
_OLD = ("ertacache-policy", "ertacache-profile")  # of before version 2


@dataclass(frozen=True, eq=False)
class Document:
    """A file whose header has been read and checked, and whose tensors have not been touched.

    Attributes:
        fields: the JSON object of the header, without format, version and checksum.
        entries: the tensors as safetensors' own header declares them.
        text: the JSON string of the header.
        checksum: of that string and the tensor section, as the header declares it.
        header: length prefix and header, as they stand in the file.
        stream: the file, positioned at the tensor section.
        size: length of the tensor section in bytes.
    """

    fields: dict[str, Any]
    entries: dict[str, Any]
    text: str
    checksum: str
    header: bytes
    stream: BinaryIO
    size: int

    def read_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return the tensors, which must be exactly ``shapes``, all float64.

        Types, shapes, offsets and total size are compared before the section is read, the
        checksum before a tensor is made.
        """
        layout, total = _layout(shapes)
        for name in sorted(self.entries.keys() | layout.keys()):
            _check_entry(name, self.entries.get(name), layout.get(name))
        if total != self.size:
            raise FormatError(
                f"the tensors take {total} bytes, but the file holds {self.size} for them"
            )
        buffer = _read(self.stream, total)
        if _digest(self.text, buffer) != self.checksum:
            raise FormatError("the checksum does not match: the file is damaged, copy it again")
        return safetensors.torch.load(self.header + buffer)


def open_document(stream: BinaryIO, size: int) -> Document:
    """Read and check the header of a file of ``size`` bytes."""
    if size > MAX_FILE_BYTES:
        raise FormatError(f"the file has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
    if size < 8:
        raise FormatError(f"the file has {size} bytes, too few for the length of its header")
    prefix = _read(stream, 8)
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"the header claims {length} bytes, more than the limit of {MAX_HEADER_BYTES}"
        )
    if length > size - 8:
        raise FormatError(f"the header claims {length} bytes, but the file ends after {size - 8}")
    header = _read(stream, length)
    entries = parse_object(header, "the header")
    text = _metadata(entries.pop("__metadata__", None))
    fields = parse_object(text.encode(), f"the metadata {METADATA_KEY!r}")
    _take_format(fields)
    return Document(
        checksum=_take_checksum(fields, text),
        fields=fields,
        entries=entries,
        text=text,
        header=prefix + header,
        stream=stream,
        size=size - 8 - length,
    )


def pack(fields: Mapping[str, object], *, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a file; the same bytes for the same content.

    Example:
        >>> import torch
        >>> data = pack({}, tensors={"sigmas": torch.ones(2).double()})
        >>> len(data)
        248
    """
    _, total = _layout({name: tuple(value.shape) for name, value in tensors.items()})
    if total > MAX_FILE_BYTES:
        raise FormatError(f"its tensors take {total} bytes, more than the limit {MAX_FILE_BYTES}")
    # Clones, because safetensors refuses tensors that share their memory.
    ready = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = canonical({"format": FORMAT, "version": VERSION, **fields})
    draft = _serialize(text, "0" * 64, ready)
    start = 8 + struct.unpack("<Q", draft[:8])[0]
    if start > MAX_HEADER_BYTES or len(draft) > MAX_FILE_BYTES:
        raise FormatError(
            f"its header takes {start} and the file {len(draft)} bytes, more than the limits "
            f"{MAX_HEADER_BYTES} and {MAX_FILE_BYTES}: use fewer or shorter prompts"
        )
    return _serialize(text, sha256(text.encode() + draft[start:]).hexdigest(), ready)


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading; yields it and its size."""
    mode = os.stat(path).st_mode  # before opening: opening a pipe would wait for its writer
    if stat.S_ISDIR(mode):
        raise FormatError("it is a directory, not a file")
    if not stat.S_ISREG(mode):
        raise FormatError("it is not a regular file")
    with open(path, "rb") as stream:
        yield stream, os.fstat(stream.fileno()).st_size


def _serialize(text: str, checksum: str, tensors: dict[str, Tensor]) -> bytes:
    sealed = _SEAL.format(checksum) + text[1:]
    return safetensors.torch.save(tensors, metadata={METADATA_KEY: sealed})


def _digest(sealed: str, buffer: bytes) -> str:
    return sha256(b"{" + sealed[_SEAL_LENGTH:].encode() + buffer).hexdigest()


def _read(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise FormatError("the file became shorter while it was read")
    return data


def _metadata(value: object) -> str:
    if type(value) is not dict or type(value.get(METADATA_KEY)) is not str or len(value) != 1:
        raise FormatError(
            f"its metadata is not the one string {METADATA_KEY!r}: not an ertacache file"
        )
    text = value[METADATA_KEY]
    if not text.isascii():
        raise FormatError(f"its metadata {METADATA_KEY!r} is not ASCII")
    return str(text)


def _take_format(fields: dict[str, Any]) -> None:
    """Take format and version out of the fields of a header, checked."""
    name, version = fields.pop("format", None), fields.pop("version", None)
    if type(name) is not str or name not in _OLD:
        raise FormatError("it is not an ertacache policy")
    if type(version) is not int or version < 1:
        raise FormatError("its format version is not a positive integer")
    if version < VERSION or name != FORMAT:
        raise FormatError(
            f"it has a format of before version {VERSION}, which this ertacache does not read: "
            "calibrate again"
        )
    if version > VERSION:
        raise FormatError(
            f"it has format version {version} and this ertacache reads version {VERSION}: "
            "upgrade ertacache"
        )


def _take_checksum(fields: dict[str, Any], text: str) -> str:
    checksum = fields.pop("checksum", None)
    if type(checksum) is not str or not text.startswith(_SEAL.format(checksum)):
        raise FormatError("its metadata does not begin with a checksum")
    if len(checksum) != 64:
        raise FormatError("its checksum does not have 64 digits")
    return checksum


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, object], int]:
    """Return the only entries that the header may have, and the size of the tensor section."""
    layout: dict[str, object] = {}
    end = 0
    for name in sorted(shapes):
        begin, end = end, end + 8 * _product(shapes[name])
        layout[name] = {"dtype": "F64", "shape": shapes[name], "data_offsets": (begin, end)}
    return layout, end


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _check_entry(name: str, found: object, wanted: object) -> None:
    if wanted is None:
        raise FormatError(f"it holds an unknown tensor {name[:40]!r}")
    if found is None:
        raise FormatError(f"it lacks the tensor {name!r}")
    declared, expected = canonical(found), canonical(wanted)  # as JSON: 1, 1.0 and true differ
    if declared != expected:
        raise FormatError(f"it declares {name!r} as {declared[:120]}, expected {expected}")
