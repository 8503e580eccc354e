"""One writer per file: a lock of the operating system, which ends with its process.

The lock is on a hidden file beside, which names the process that holds it. Processes that read do
not need it, because files are written whole.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSYS
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["locked"]

MAX_OWNER = 100  # characters that are read of the name of a process


@contextmanager
def locked(path: str | os.PathLike[str], *, timeout: float = 0.0) -> Iterator[None]:
    """Let no other process, nor another thread, write ``path`` meanwhile.

    The thread that holds the lock may take it again. A killed process leaves the lock file, but no
    lock.

    Args:
        path: a file that is there or will be; a symbolic link stands for what it points to.
        timeout: seconds to wait for another process.

    Raises:
        ValueError: another process holds the lock, which is named, or the folder cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with locked(Path(folder) / "p.safetensors"):
        ...         [file.name for file in Path(folder).iterdir()]
        ...     list(Path(folder).iterdir())
        ['.p.safetensors.lock']
        []
    """
    target = Path(os.path.realpath(path))
    place = target.with_name(f".{target.name}.lock")
    lock = _acquire(os.fspath(path), place, timeout)
    if lock is None:
        yield
        return
    outermost = lock.lock_counter == 1
    try:
        if outermost:
            with suppress(OSError):  # only the message to others becomes shorter
                place.write_text(f"process {os.getpid()} on {platform.node()}")
        yield
    finally:
        if outermost:
            # While the lock is held: whoever has opened the file meanwhile finds it unlinked when
            # it gets the lock, and begins again with a new one.
            with suppress(OSError):
                place.unlink()
        lock.release()


def _acquire(path: str, place: Path, timeout: float) -> BaseFileLock | None:
    """The lock, acquired; None where the file system has no locks."""
    from filelock import FileLock, Timeout

    if not place.parent.is_dir():  # filelock would create it
        raise ValueError(f"cannot write {path!r}: there is no folder {str(place.parent)!r}")
    lock = FileLock(place, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise ValueError(
            f"{path!r} is being written by {_owner(place)}: wait until it ends, or write to "
            "another file"
        ) from None
    except OSError as cause:
        if cause.errno != ENOSYS:
            raise ValueError(
                f"cannot write {path!r}: its lock {str(place)!r}: {cause.strerror}"
            ) from cause
        warnings.warn(
            f"{path!r} is on a file system without locks: do not write it from two processes",
            stacklevel=2,
        )
        return None
    return lock


def _owner(place: Path) -> str:
    """The process that holds a lock, as it has written it down."""
    with suppress(OSError, UnicodeDecodeError), place.open(encoding="utf-8") as stream:
        return stream.read(MAX_OWNER).strip() or "another process"
    return "another process"
