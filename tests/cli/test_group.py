"""How a command ends: exit codes, and errors of one line."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest

from ertacache.report import page
from tests.cli.conftest import Run, messages, python


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


def test_messages_of_the_library_are_lines_each_once(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("ertacache")
    before = (logger.level, list(logger.handlers))

    def make_page(paths: object, **_: object) -> str:
        for _ in range(2):
            logger.info("solved a plan: %d of %d steps computed", 8, 24)
            logging.getLogger("ertacache.integration.identity").info("the run\n differs \x1b[31m")
        logger.debug("a detail")
        logger.warning("replacing the attached policy")
        warnings.warn("every step is computed", stacklevel=1)
        logging.getLogger("diffusers").info("of another library")
        return "<html>"

    monkeypatch.setattr(page, "make_page", make_page)
    for _ in range(2):  # once per command
        result = run("report", "a.json", "-o", tmp_path / "page.html")
        assert result.exit_code == 0, result.output
        assert messages(result) == [
            "solved a plan: 8 of 24 steps computed",
            "the run differs \\x1b[31m",
            "warning: replacing the attached policy",
            "warning: every step is computed",
        ]
        assert result.stdout == f"Report in {tmp_path / 'page.html'}\n"
        assert (logger.level, list(logger.handlers)) == before
