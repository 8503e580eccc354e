"""The list of commands, their help, and what importing them loads."""

from __future__ import annotations

import re
import shlex
from importlib import import_module

import pytest
import typer.main

import ertacache.cli
from ertacache.cli import app
from tests.cli.conftest import Run, python

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


def test_help_loads_nothing_heavy() -> None:
    show = "app(['calibrate', '--help'], standalone_mode=False)"
    code = f"import sys; from ertacache.cli import app; {show}; print(*sys.modules)"
    loaded = set(python("-c", code).stdout.split())
    assert "typer" in loaded
    assert not {"torch", "diffusers", "transformers", "numpy", "PIL"} & loaded


def test_the_process_shows_the_help() -> None:
    assert python("-m", "ertacache.cli", "--help").returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_function_of_the_module_of_its_name(name: str) -> None:
    module = import_module(f"ertacache.cli.{name}")
    assert getattr(ertacache.cli, name) is module
    assert callable(getattr(module, name))
    assert module.EXAMPLES
