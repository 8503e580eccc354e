"""How a command ends: exit codes, and errors of one line."""

from __future__ import annotations

import re

import pytest

from tests.cli.conftest import Run, python


def test_the_process_ends_with_the_exit_code_and_one_line() -> None:
    done = python("-m", "ertacache.cli", "solve", "--method", "magic", "p", "-o", "q")
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]*'magic'[^\n]*'ertacache solve --help'[^\n]*\n", done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [["--absent"], ["absent"], ["solve"], ["solve", "p"], ["profile", "m", "-o", "o", "--limit=0"]],
)
def test_wrong_options_are_one_line(arguments: list[str], run: Run) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
