"""One writer per file: the second is refused, a killed one leaves no lock."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ertacache.formats.lock import locked
from tests.formats.faults import holding_lock

_COUNT = """
import sys
from pathlib import Path
from ertacache.formats.lock import locked
path = Path(sys.argv[1])
for _ in range(30):
    with locked(path, timeout=60):
        path.write_text(str(int(path.read_text()) + 1))
"""


def take(path: Path) -> None:
    with locked(path):
        pass


def test_the_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    (tmp_path / "link").symlink_to(path)
    with holding_lock(path) as other:
        for name in ("p.safetensors", "link"):
            with pytest.raises(ValueError, match=f"written by process {other.pid} on .*: wait"):
                take(tmp_path / name)
        other.kill()
        other.wait()
        assert (tmp_path / ".p.safetensors.lock").exists()
        take(path)
    assert {file.name for file in tmp_path.iterdir()} == {"link"}


def test_processes_that_wait_take_turns(tmp_path: Path) -> None:
    """Also though each of them removes the lock file that others have opened."""
    path = tmp_path / "count"
    path.write_text("0")
    command = [sys.executable, "-c", _COUNT, str(path)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert path.read_text() == "90"
    assert list(tmp_path.iterdir()) == [path]


def test_a_thread_may_take_its_lock_again_and_another_thread_not(tmp_path: Path) -> None:
    path, lock = tmp_path / "p", tmp_path / ".p.lock"
    with locked(path):
        take(path)
        assert lock.exists()
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="is being written"):
            pool.submit(take, path).result()
    assert not lock.exists()


def test_a_lock_file_without_a_name(tmp_path: Path) -> None:
    with holding_lock(tmp_path / "p"):
        for content in (b"", b"\xff"):
            (tmp_path / ".p.lock").write_bytes(content)
            with pytest.raises(ValueError, match="is being written by another process: wait"):
                take(tmp_path / "p")


def test_folders_and_file_systems_that_cannot_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "absent" / "p"
    with pytest.raises(ValueError, match=f"cannot write '{path}': there is no folder"):
        take(path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".folder.lock").mkdir()
    with pytest.raises(ValueError, match=r"cannot write '.*folder': its lock '.*': Is a directory"):
        take(tmp_path / "folder")

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.warns(UserWarning, match="without locks: do not write it from two processes"):
        take(tmp_path / "p")
