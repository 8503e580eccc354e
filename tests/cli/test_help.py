"""The list of commands, their help, and how fast it is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

import ertacache
from ertacache.cli import app
from tests.cli.conftest import Run

GROUP = typer.main.get_command(app)
COMMANDS = (
    "demo",
    "profile",
    "merge",
    "solve",
    "calibrate",
    "generate",
    "inspect",
    "bench",
    "report",
    "metrics",
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def examples(text: str) -> list[str]:
    return [line[line.index("ertacache ") :] for line in text.splitlines() if is_example(line)]


def is_example(line: str) -> bool:
    return re.match(r"\s+(Example: )?ertacache [a-z]", line) is not None


def test_the_commands_are_these(run: Run) -> None:
    listed = re.findall(r"^  ([a-z]+) {2,}\w", run("--help").stdout.split("Commands:")[1], re.M)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_every_example_parses(name: str, run: Run) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    found = examples(result.stdout)
    assert found
    for line in found:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("ertacache", name)
        context = GROUP.commands[name].make_context(name, arguments)
        assert "output" in context.params or "file" in context.params


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    assert run().stdout == run("--help").stdout
    assert examples(run().stdout)


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"ertacache {ertacache.__version__}\n"


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    loaded = python("-c", "import ertacache.cli, sys; print(*sys.modules)").stdout.split()
    assert "typer" in loaded
    assert not {"torch", "diffusers", "transformers", "numpy", "PIL"} & set(loaded)


def test_help_is_there_in_well_under_a_second() -> None:
    times = []
    for _ in range(3):
        before = os.times().children_user  # processor time: the machine may be busy
        assert python("-m", "ertacache.cli", "--help").returncode == 0
        times.append(os.times().children_user - before)
    assert min(times) < 1


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
