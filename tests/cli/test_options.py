"""The bundles of options: what a command gets, and that no option of them is lost."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer
import typer.main

import ertacache
from ertacache.calibration.solve import PaperOptions, Target
from ertacache.cli import app
from ertacache.cli.options import (
    CallOptions,
    Model,
    PromptOptions,
    TargetOptions,
    expand_bundles,
    parse_arguments,
)

GROUP = typer.main.get_command(app)


@pytest.mark.parametrize(
    ("name", "bundles"),
    [
        ("profile", [PromptOptions, CallOptions]),
        ("solve", [TargetOptions]),
        ("calibrate", [TargetOptions, PromptOptions, CallOptions]),
        ("generate", [CallOptions]),
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


def test_a_target_has_the_fields_that_calibration_takes() -> None:
    target = TargetOptions(speedup=2.0)
    taken = {field.name for kind in (Target, PaperOptions) for field in fields(kind)}
    assert set(target.given()) == taken
    assert taken <= set(inspect.signature(ertacache.calibrate).parameters)
    assert taken <= set(inspect.signature(ertacache.solve).parameters)


@pytest.mark.parametrize("name", ["prompt", "generator", "output_type"])
def test_arguments_that_the_command_sets_itself(name: str) -> None:
    with pytest.raises(ValueError, match=f"--arg cannot set '{name}'"):
        parse_arguments([f"{name}=x"])
