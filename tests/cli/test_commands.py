"""The list of commands, their help, and what importing them loads."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

import ertacache.cli
from ertacache.cli import app
from ertacache.formats.policy import Policy
from ertacache.models import zoo
from tests.cli.conftest import Run, python

GROUP = typer.main.get_command(app)
COMMANDS = (
    "demo",
    "profile",
    "merge",
    "solve",
    "calibrate",
    "refit",
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


@pytest.mark.parametrize(
    "name", ["profile", "merge", "solve", "calibrate", "refit", "generate", "inspect", "bench"]
)
def test_every_example_runs(
    name: str,
    policy_file: Path,
    profile_file: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its end, or until it loads its model: that far, all options and files were right."""

    def load(model: str, dtype: object) -> None:
        raise ValueError("as far as this")

    monkeypatch.setattr(zoo, "load_pipeline", load)
    monkeypatch.chdir(tmp_path)
    shutil.copy(policy_file, "policy.safetensors")
    shutil.copy(profile_file, "profile.safetensors")
    shutil.copy(profile_file, "part-1.safetensors")
    policy = Policy.load(profile_file)
    assert policy.profile is not None
    runs = tuple(replace(run, seed=run.seed + 100) for run in policy.profile.runs)
    replace(policy, profile=replace(policy.profile, runs=runs)).save("part-2.safetensors")
    for prompts in ("prompts.txt", "heldout.txt", "mine.txt", "others.txt"):
        Path(prompts).write_text(f"a cat of {prompts}\n")
    for line in examples(run(name, "--help").stdout):
        result = run(*shlex.split(line)[1:])
        if name in ("merge", "solve", "inspect"):
            assert result.exit_code == 0, result.output
        else:
            assert result.exit_code == 2
            assert result.stderr.endswith(": as far as this\n")


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
