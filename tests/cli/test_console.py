"""What reaches the terminal: colour, characters and control sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from ertacache.cli import app
from ertacache.formats.policy import Policy
from tests.cli.conftest import Run


def test_colour_only_where_it_is_wanted(policy_file: Path, run: Run) -> None:
    arguments = ["inspect", policy_file, "--coefficients"]
    assert "\x1b" not in run(*arguments).output
    assert "\x1b[32m" in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": None}).stdout
    assert "\x1b" not in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).output


def test_output_without_unicode(policy_file: Path) -> None:
    result = CliRunner(charset="ascii").invoke(app, ["inspect", str(policy_file), "--frontier"])
    assert result.exit_code == 0
    assert "#." in result.stdout


def test_control_characters_of_a_file_are_escaped(
    policy_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    replace(Policy.load(policy_file), provenance={"note": "\x1b[2Jgone\nnew line"}).save(path)
    text = run("inspect", path).stdout
    assert "\x1b" not in text
    assert "note          \\x1b[2Jgone new line\n" in text
