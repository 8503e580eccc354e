"""Files are written whole or not at all, with the permissions of the umask."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from ertacache.formats.files import append_whole, draft, write_whole
from tests.formats.faults import full_disk

OLD, NEW = "old\n", "new " * 100


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o640
    os.umask(before)


@pytest.mark.parametrize("old", [None, OLD])
def test_a_full_disk_leaves_the_old_file_or_none(old: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    if old is not None:
        path.write_text(old)
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, NEW)
    assert caught.value.filename == str(path)  # not the draft
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if old is None else [OLD])
    write_whole(path, NEW)
    assert path.read_text() == NEW


def test_a_disk_that_is_full_only_when_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.txt"
    write_whole(path, OLD)
    monkeypatch.setattr("os.fsync", fail)
    for action in (write_whole, append_whole):
        with pytest.raises(OSError, match="No space left on device") as caught:
            action(path, NEW)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert [file.read_text() for file in tmp_path.iterdir()] == [OLD]


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    append_whole(path, OLD)
    append_whole(path, OLD)
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        append_whole(path, NEW)  # the first 92 characters would fit
    assert caught.value.filename == str(path)
    assert path.read_text() == OLD + OLD


def test_a_writer_that_fails_or_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(OLD)
    with pytest.raises(KeyboardInterrupt), draft(path) as made:  # noqa: PT012
        made.write_text(NEW)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [path]
    code = """
import os, signal, sys
from ertacache.formats.files import draft
with draft(sys.argv[1]) as made:
    made.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert path.read_text() == OLD
    (left,) = set(tmp_path.iterdir()) - {path}
    assert left.name.startswith(".")


def test_the_permissions_are_those_of_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a.txt"
    with draft(path) as made:
        other = tmp_path / "private"  # some writers put a file of their own in its place
        other.touch(mode=0o600)
        other.replace(made)
    assert S_IMODE(path.stat().st_mode) == umask
    path.chmod(0o600)  # by the user
    write_whole(path, NEW)
    assert S_IMODE(path.stat().st_mode) == 0o600


def test_links_stay_and_only_regular_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == NEW
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, words in (("pipe", "not a regular file"), ("folder", "a directory, not a file")):
        with pytest.raises(OSError, match=f"it is {words}: .*{name}"):
            write_whole(tmp_path / name, NEW)
    with pytest.raises(FileNotFoundError, match=r"absent/a.txt"):
        write_whole(tmp_path / "absent" / "a.txt", NEW)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_name_of_another_file_in_an_error_stays(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source"), draft(tmp_path / "a.txt"):
        (tmp_path / "source").read_bytes()
    assert list(tmp_path.iterdir()) == []
