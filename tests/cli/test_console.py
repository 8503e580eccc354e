"""What reaches the terminal: colour, characters and control sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ertacache.cli import app, group
from ertacache.cli.console import Stages, print_line
from ertacache.formats.policy import Policy
from tests.cli.conftest import Run


def test_colour_only_where_it_is_wanted(policy_file: Path, run: Run) -> None:
    arguments = ["inspect", policy_file, "--coefficients"]
    assert "\x1b" not in run(*arguments).output
    assert "\x1b[32m" in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": None}).stdout
    assert "\x1b" not in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).output


def test_output_without_unicode(policy_file: Path) -> None:
    result = CliRunner(charset="ascii").invoke(app, ["inspect", str(policy_file)])
    assert result.exit_code == 0
    assert "#." in result.stdout


def test_control_characters_of_a_file_are_escaped(
    policy_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    replace(Policy.load(policy_file), provenance={"note": "\x1b[2Jgone\nnew line"}).save(path)
    text = run("inspect", path).stdout
    assert "\x1b" not in text
    assert "note          \\x1b[2Jgone\n" + " " * 14 + "new line\n" in text


def test_lines_go_above_the_progress_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("TERM", "xterm")
    with Stages() as stage:
        progress = stage("generate")
        group._report("solved a plan")
        print_line("a result")
        progress(1, 1)
    found = capsys.readouterr()
    assert "\x1b[2Ksolved a plan\n" in found.err  # the bar is erased first, and drawn again below
    assert "generate" in found.err.split("solved a plan\n")[1]
    assert "a result" in found.out.splitlines()  # not a terminal: where it belongs
    assert "a result" not in found.err
