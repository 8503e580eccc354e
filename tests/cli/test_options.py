"""The bundles of options: what a command gets, and that no option of them is lost."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

import ertacache
from ertacache.calibration.solve import PaperOptions
from ertacache.cli import program
from ertacache.cli.options import (
    CallOptions,
    Model,
    PromptOptions,
    RunBudget,
    RunTarget,
    TargetOptions,
    expand_bundles,
    parse_arguments,
)
from ertacache.core.plans import Target
from tests.cli.conftest import Refused

GROUP = typer.main.get_command(program)


@pytest.mark.parametrize(
    ("name", "bundles"),
    [
        ("profile", [PromptOptions, CallOptions]),
        ("solve", [TargetOptions]),
        ("calibrate", [TargetOptions, PromptOptions, CallOptions]),
        ("refit", [RunBudget, CallOptions]),
        ("generate", [RunTarget, CallOptions]),
        ("bench", [CallOptions]),
    ],
)
def test_a_command_has_every_option_of_its_bundles(name: str, bundles: list[Any]) -> None:
    shown = {parameter.name: parameter for parameter in GROUP.commands[name].params}
    for bundle in bundles:
        for field in fields(bundle):
            assert shown[field.name].help
            assert shown[field.name].default == field.default


def test_a_bundle_is_built_from_its_options() -> None:
    found: list[Any] = []

    def command(
        context: typer.Context, prompts: PromptOptions, *, flag: bool = False, call: CallOptions
    ) -> None:
        found.extend([prompts, flag, call])

    alone = typer.Typer()
    alone.command()(expand_bundles(command))
    arguments = ["--limit", "3", "--flag", "--steps", "8", "--arg", "a=1", "--arg", "b=c"]
    typer.main.get_command(alone)(arguments, standalone_mode=False)
    call = CallOptions(steps=8, arguments=["a=1", "b=c"])
    assert found == [PromptOptions(limit=3), True, call]
    assert call.given() == {"a": 1, "b": "c", "num_inference_steps": 8}


def test_a_command_without_bundles_stays_as_it_is() -> None:
    def command(model: Model, seed: int = 0) -> None: ...

    expanded = inspect.signature(expand_bundles(command)).parameters
    assert list(expanded) == ["model", "seed"]
    assert expanded["seed"].default == 0


def test_two_bundles_with_the_same_option_are_refused() -> None:
    def command(first: CallOptions, second: CallOptions) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'steps'"):
        expand_bundles(command)


def test_a_target_has_the_fields_that_the_library_takes() -> None:
    targets = {field.name for field in fields(Target)}
    taken = targets | {field.name for field in fields(PaperOptions)} | {"method", "threshold"}
    assert set(TargetOptions(speedup=[2.0]).given()) == taken
    assert taken <= set(inspect.signature(ertacache.calibrate).parameters)
    assert taken <= set(inspect.signature(ertacache.solve).parameters)
    assert set(RunTarget().given()) == targets
    assert targets <= set(inspect.signature(ertacache.attach).parameters)
    assert set(RunBudget().given()) <= set(inspect.signature(ertacache.refit).parameters)


COMMANDS = {
    "profile": ["emoji-flux", "-o", "{new}"],
    "calibrate": ["emoji-flux", "-o", "{new}"],
    "solve": ["{policy}", "-o", "{new}"],
    "refit": ["{policy}", "-o", "{new}"],
    "generate": ["emoji-flux", "a cat", "--policy", "{policy}", "-o", "{new}"],
    "bench": ["emoji-flux", "-o", "{new}.json"],
}
BAD_NUMBERS = {
    "--speedup": (["calibrate", "solve", "refit", "generate"], "nan inf 0 -2 0.5"),
    "--compute-steps": (["calibrate", "solve", "refit", "generate"], "nan 0 -3 1"),
    "--min-psnr": (["calibrate", "solve", "generate"], "nan inf -inf 0 -40"),
    "--threshold": (["calibrate", "solve"], "nan inf -0.1"),
    "--guidance": (["profile", "calibrate", "refit", "generate", "bench"], "nan inf"),
    "--budgets": (["bench"], "nan inf 2,0 -2 1"),
    "--arg": (
        ["profile", "calibrate", "refit", "generate", "bench"],
        'cfg=NaN cfg=-Infinity cfg=1e999 cfg=[2,NaN] cfg={"a":[NaN]}',
    ),
    "--steps": (["profile", "calibrate", "refit", "generate", "bench"], "nan 0 -1 1000000000"),
    "--height": (["profile", "calibrate", "refit", "generate", "bench"], "nan 0 -8 1.5"),
    "--frames": (["profile", "calibrate", "refit", "generate", "bench"], "nan 0"),
    "--seed": (["profile", "calibrate", "bench"], f"nan -1 {10**30}"),
    "--seeds": (["generate"], f"nan -1 1,{10**30}"),
    "--fps": (["generate"], "nan 0 -1 1000000"),
    "--batch-size": (["profile", "calibrate", "refit", "bench"], "nan 0 -1"),
    "--limit": (["profile", "calibrate", "bench"], "nan 0"),
    "--refit-prompts": (["calibrate"], "nan 0"),
    "--calibration": (["bench"], "nan 1"),
}


@pytest.mark.parametrize(
    ("command", "option", "number"),
    [
        (command, option, number)
        for option, (commands, numbers) in BAD_NUMBERS.items()
        for command in commands
        for number in numbers.split()
    ],
)
@pytest.mark.usefixtures("no_model")
def test_a_bad_number_is_refused_before_a_model_is_loaded(
    command: str, option: str, number: str, policy_file: Path, tmp_path: Path, refused: Refused
) -> None:
    new = tmp_path / "new"
    given = [each.format(policy=policy_file, new=new) for each in COMMANDS[command]]
    paper = ["--method", "paper"] if option == "--threshold" else []
    line = refused(command, *given, *paper, option, number)
    assert option in line
    assert number in line or "Input should be" in line
    assert list(tmp_path.iterdir()) == []


def test_one_bad_number_of_several_is_refused(policy_file: Path, refused: Refused) -> None:
    line = refused("solve", policy_file, "--speedup", 2, "--speedup", "nan", "-o", policy_file)
    assert line == "error: --speedup must be a finite number of at least 1, got nan"


@pytest.mark.parametrize("name", ["prompt", "generator", "output_type"])
def test_arguments_that_the_command_sets_itself(name: str) -> None:
    with pytest.raises(ValueError, match=f"--arg cannot set '{name}'"):
        parse_arguments([f"{name}=x"])


@pytest.mark.usefixtures("no_model")
def test_an_argument_given_twice(tmp_path: Path, refused: Refused) -> None:
    arguments = ["generate", "emoji-flux", "a cat", "-o", tmp_path / "a.png", "--arg", "height=48"]
    line = refused(*arguments, "--height", 64)
    assert "height is given twice: by an option of its own and by --arg" in line
    assert "height is given twice by --arg" in refused(*arguments, "--arg", "height=64")
