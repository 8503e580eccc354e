"""The environment of the real server: where it is, and what is said if it cannot be built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.comfyui.live import environment


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERTACACHE_COMFYUI", str(tmp_path))


def test_it_is_outside_of_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.environment().folder.parent == tmp_path
    monkeypatch.delenv("ERTACACHE_COMFYUI")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert environment.cache_folder() == Path("/somewhere/ertacache/comfyui")


def test_without_an_index_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*command: str, **options: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="warning\nERROR: no index\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert environment.main() == 1
    assert capsys.readouterr().out == "ComfyUI cannot be set up for tests: ERROR: no index\n"


def test_one_that_is_complete_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment.environment()
    found.folder.mkdir()
    found.stamp.touch()
    monkeypatch.setattr(subprocess, "run", None)
    assert environment.build() == found
