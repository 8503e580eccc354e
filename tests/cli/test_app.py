"""The command of the app: bad input, and a session that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.cli.conftest import Refused

pytest.importorskip("gradio")


def test_bad_input_is_one_line(tmp_path: Path, refused: Refused) -> None:
    assert "there is no folder" in refused("app", "--folder", tmp_path / "absent")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused("app", "--port", port, "--no-browser")
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert "give another --port" in message


def test_a_session_ends_with_nothing_left(tmp_path: Path) -> None:
    """Started as a user does, asked for its page, and terminated."""
    temporary, folder = tmp_path / "tmp", tmp_path / "work"
    for path in (temporary, folder):
        path.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ertacache", "app", "--folder", str(folder), "--no-browser"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            page = ask(f"http://127.0.0.1:{port}/", process)
            assert "ertacache" in page
            assert list(temporary.glob("ertacache-app-*"))
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list(temporary.iterdir()) == []
    assert list(folder.iterdir()) == []


def ask(address: str, process: subprocess.Popen[str]) -> str:
    """The page, as soon as it is there."""
    while process.poll() is None:
        try:
            with urlopen(address) as answer:
                return str(answer.read().decode())
        except URLError:
            time.sleep(0.2)
    raise AssertionError("the app ended")
