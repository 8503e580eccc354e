"""Files written whole or not at all: the one writer of the package.

A file is written as a draft beside its place, synced, and then put in its place: a full disk or a
killed process leaves the old file, or none. Knows no format.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE

__all__ = ["DRAFT", "append_whole", "draft", "write_whole"]

DRAFT = ".ertacache-"  # how the names of drafts begin


@contextmanager
def draft(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty file beside ``path``, which takes its place if nothing is raised.

    The draft has the suffix of ``path``, from which some writers choose their format. A new file
    has the permissions that the umask gives, whatever the writer sets; an old file's stay.

    Raises:
        OSError: with the name of ``path``, not that of the draft.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with draft(Path(folder) / "a.txt") as place:
        ...         written = place.write_text("whole")
        ...     [file.name for file in Path(folder).iterdir()]
        ['a.txt']
    """
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    made = target.with_name(f"{DRAFT}{token_hex(8)}{target.suffix}")
    with _naming(path, made):
        try:
            _check_target(target)
            open(made, "xb").close()
            mode = S_IMODE((target if target.exists() else made).stat().st_mode)
            yield made
            with open(made, "rb+") as stream:
                os.fsync(stream.fileno())
            made.chmod(mode)
            os.replace(made, target)
        finally:
            made.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file, strings as UTF-8, so that at any moment the old or the new one is there, whole.

    Raises:
        OSError: with the name of ``path``.
    """
    with draft(path) as made:
        made.write_bytes(data.encode() if isinstance(data, str) else data)


def append_whole(path: str | os.PathLike[str], data: str) -> None:
    """Append to a file; if that fails, what was there before stays, and nothing more.

    Raises:
        OSError: with the name of ``path``.
    """
    with _naming(path), open(path, "ab", buffering=0) as stream:
        before = stream.tell()
        try:
            _write_all(stream.fileno(), data.encode())
            os.fsync(stream.fileno())
        except BaseException:
            with suppress(OSError):
                stream.truncate(before)
            raise


def _write_all(place: int, data: bytes) -> None:
    """Write everything; a disk that fills up takes a part first."""
    while data:
        data = data[os.write(place, data) :]


def _check_target(target: Path) -> None:
    if target.is_dir():
        raise OSError(errno.EISDIR, "it is a directory, not a file")
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


@contextmanager
def _naming(path: str | os.PathLike[str], made: Path | None = None) -> Iterator[None]:
    """Give errors of the system the name of the file that was to be written."""
    try:
        yield
    except OSError as cause:
        names = (cause.filename, cause.filename2)  # of a copy, both
        if cause.filename is not None and str(made) not in map(str, names):
            raise
        reason = cause.strerror or str(cause)
        raise OSError(cause.errno or errno.EIO, reason, os.fspath(path)) from cause
