from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ertacache.cli import program
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.models import zoo
from ertacache.models.zoo import MODELS

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = "6"

T = int(STEPS)

Run = Callable[..., Result]
Refused = Callable[..., str]
Variant = Callable[..., Path]


def invoke(*arguments: object, env: dict[str, str | None] | None = None) -> Result:
    """Run a command of the command line; a traceback is a failure of the test."""
    result = CliRunner().invoke(program, [str(argument) for argument in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


PROGRESS = re.compile(r"[\w -]+( \.\.\.|: (\d+ of \d+|done) in [^:]+)")


def messages(result: Result) -> list[str]:
    """The lines on standard error that are no progress."""
    return [line for line in result.stderr.splitlines() if not PROGRESS.fullmatch(line)]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def run() -> Run:
    return invoke


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they are, whatever a test runner says of its terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def refused() -> Refused:
    """Run a command that must fail on bad input; returns its one line."""

    def refuse(*arguments: object) -> str:
        result = invoke(*arguments)
        lines = messages(result)
        assert result.exit_code == 2, result.output
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        assert result.stdout == ""
        return lines[0]

    return refuse


@pytest.fixture(scope="session")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of three prompts, made by the command."""
    path = tmp_path_factory.mktemp("profile") / "profile.safetensors"
    result = invoke("profile", "emoji-flux", "--limit", 3, "--steps", STEPS, "-o", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="session")
def policy_file(profile_file: Path) -> Path:
    """A policy that computes half of the steps."""
    path = profile_file.with_name("policy.safetensors")
    result = invoke("solve", profile_file, "--speedup", 2, "-o", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="session")
def calibrated_file(policy_file: Path) -> Path:
    """The same policy as if it had been measured."""
    path, policy = policy_file.with_name("calibrated.safetensors"), Policy.load(policy_file)
    rows = (
        ValidationRow("policy", T // 2, psnr=46.54, speedup=1.9, prompts=24),
        ValidationRow("plain reuse", T // 2, psnr=float("inf"), speedup=2, prompts=24),
    )
    measured = replace(policy.default, validation=rows, measured_error=0.0125)
    replace(policy, plans=(measured,), unit_psnr=12.0).save(path)
    return path


@pytest.fixture(scope="session")
def old_file(profile_file: Path) -> Path:
    """A file with the format version of before."""
    path = profile_file.with_name("old.safetensors")
    path.write_bytes(profile_file.read_bytes().replace(rb"\"version\":2", rb"\"version\":1"))
    return path


@pytest.fixture(scope="session")
def paper_file(profile_file: Path) -> Path:
    """A policy of the paper's method."""
    path = profile_file.with_name("paper.safetensors")
    result = invoke("solve", profile_file, "--speedup", 2, "--method", "paper", "-o", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails the test."""
    monkeypatch.setattr(zoo, "load_pipeline", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture
def variant(tmp_path: Path) -> Variant:
    """The bundled pipeline as a folder of its own, with another scheduler configuration."""

    def build(**config: Any) -> Path:
        folder = tmp_path / "variant"
        shutil.copytree(MODELS["emoji-flux"].folder, folder, copy_function=os.symlink)
        path = folder / "scheduler" / "scheduler_config.json"
        changed = json.loads(path.read_text()) | config
        path.unlink()
        path.write_text(json.dumps(changed))
        return folder

    return build


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a red apple\n\n  a small dog on a blue background \n", encoding="utf-8")
    return path
