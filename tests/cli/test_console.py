"""What reaches the terminal: colour, characters and control sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ertacache.cli import group, program
from ertacache.cli.console import Stages, print_line
from ertacache.formats.policy import Policy
from tests.cli.conftest import PROGRESS, Run


def test_colour_only_where_it_is_wanted(policy_file: Path, run: Run) -> None:
    arguments = ["inspect", policy_file, "--coefficients"]
    assert "\x1b" not in run(*arguments).output
    assert "\x1b[32m" in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": None}).stdout
    assert "\x1b" not in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout


def test_output_without_unicode(policy_file: Path) -> None:
    result = CliRunner(charset="ascii").invoke(program, ["inspect", str(policy_file)])
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


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    with Stages(clock=lambda: now[0]) as stage:
        stage("load")
        now[0] += 7
        progress = stage("profile")
        for done in range(1, 9):  # every 4 s, so that every third is reported
            now[0] += 4
            progress(done, 8)
        progress(8, 8)
        now[0] += 1
        stage("solve")
        now[0] += 4000
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines() == [
        "load ...",
        "load: done in 7 s",
        "profile ...",
        "profile: 3 of 8 in 12 s, about 20 s left",
        "profile: 6 of 8 in 24 s, about 8 s left",
        "profile: 8 of 8 in 32 s",
        "solve ...",
        "solve: done in 1 h 6 min",
    ]
    assert all(PROGRESS.fullmatch(line) for line in found.err.splitlines())


def test_what_was_done_before_does_not_shorten_the_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    with Stages(clock=lambda: now[0]) as stage:
        progress = stage("measure")
        for done in range(1, 91):  # found in the journal
            progress(done, 100)
        for done in (91, 92):
            now[0] += 60
            progress(done, 100)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "measure: 92 of 100 in 2 min 0 s, about 8 min 0 s left"
    )


def test_a_stage_that_fails_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Stages() as stage:
            stage("load")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert capsys.readouterr().err == "load ...\n"


def test_a_narrow_terminal_cuts_off_no_number(
    policy_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = run("inspect", policy_file)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("inspect", policy_file)
    assert narrow.stdout == wide.stdout
    assert "\u2026" not in narrow.stdout
