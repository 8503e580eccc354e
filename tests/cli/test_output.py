"""``--quiet`` and ``--json``: what goes to standard output, to standard error, and to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main

from ertacache.cli import program
from tests.cli.conftest import STEPS, Refused, Run, T

GROUP = typer.main.get_command(program)
SIZE = ["--height", 32, "--width", 32]


@pytest.mark.parametrize("name", sorted(GROUP.commands))
def test_every_command_can_be_quiet(name: str) -> None:
    (option,) = [each for each in GROUP.commands[name].params if each.name == "quiet"]
    assert option.opts == ["--quiet", "-q"]
    assert option.default is False


def test_quiet_prints_results_only(policy_file: Path, tmp_path: Path, run: Run) -> None:
    command = ["generate", "emoji-flux", "a cat", "--policy", policy_file, *SIZE]
    loud = run(*command, "-o", tmp_path / "loud.png")
    quiet = run(*command, "-o", tmp_path / "quiet.png", "--quiet")
    assert "generate" in loud.stderr
    assert quiet.stderr == ""
    assert quiet.stdout.startswith(str(tmp_path / "quiet.png"))


def test_quiet_keeps_warnings_and_errors(policy_file: Path, tmp_path: Path, run: Run) -> None:
    command = ["generate", "emoji-flux", "a cat", *SIZE, "-q", "-o", tmp_path / "cat.png"]
    warned = run(*command, "--policy", policy_file, "--arg", "true_cfg_scale=7")
    (line,) = warned.stderr.splitlines()
    assert line.startswith("warning: ")
    failed = run(*command, "--policy", tmp_path / "absent.safetensors")
    assert failed.exit_code == 2
    assert failed.stderr.startswith("error: ")


def test_json_of_generate(policy_file: Path, tmp_path: Path, run: Run) -> None:
    command = ["generate", "emoji-flux", "a cat", "--seeds", "0,1", "--policy", policy_file]
    result = run(*command, *SIZE, "--compare", "--json", "-", "-o", tmp_path)
    rows = json.loads(result.stdout)
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        assert Path(row["file"]).is_file()
        assert row["prompt"] == "a cat"
        assert (row["computed_steps"], row["reused_steps"]) == (T // 2, T - T // 2)
        assert row["psnr"] > 0
        assert min(row["seconds"], row["full_seconds"]) > 0
    assert "all 2: PSNR" in result.stderr  # lines for people


def test_json_of_generate_without_a_policy(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "values.json"
    command = ["generate", "emoji-flux", "a cat", "--steps", 2, *SIZE, "--json", file]
    result = run(*command, "-o", tmp_path / "cat.png")
    assert "full run" in result.stdout
    (row,) = json.loads(file.read_text())
    assert row.keys() == {"file", "prompt", "seed", "seconds"}


def test_json_of_inspect(calibrated_file: Path, run: Run) -> None:
    found = json.loads(run("inspect", calibrated_file, "--json", "-").stdout)
    (plan,) = found["plans"]
    own, plain = plan["validation"]
    assert (own["psnr"], plain["psnr"]) == (46.54, None)  # null is identical
    assert len(plan["compute_steps"]) == T // 2
    assert found["fingerprint"]["pipeline"] == "FluxPipeline"
    assert found["profile"] == {"runs": 3, "num_steps": T}
    assert found["provenance"]["model"] == "emoji-flux"
    assert found["frontier"]


def test_json_of_calibrate_and_refit(tmp_path: Path, run: Run) -> None:
    policy, values = tmp_path / "policy.safetensors", tmp_path / "values.json"
    command = ["calibrate", "emoji-flux", "--limit", 3, "--steps", STEPS, *SIZE, "--speedup", 2]
    done = run(*command, "-o", policy, "--json", "-")
    assert done.exit_code in (0, 3), done.output
    found = json.loads(done.stdout)
    assert found["policy"] == str(policy)
    (plan,) = found["plans"]
    assert isinstance(plan["recommended"], bool)
    done = run("refit", policy, "--speedup", 3, *SIZE, "--json", values)
    assert done.exit_code in (0, 3), done.output
    (plan,) = json.loads(values.read_text())["plans"]
    assert (len(plan["compute_steps"]), plan["recommended"]) == (2, None)


@pytest.mark.usefixtures("no_model")
def test_json_of_solve_and_merge(profile_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "new.safetensors"
    found = json.loads(run("solve", profile_file, "--speedup", 2, "-o", path, "--json", "-").stdout)
    (plan,) = found["plans"]
    assert (found["policy"], len(plan["compute_steps"])) == (str(path), T // 2)
    assert (plan["validation"], plan["recommended"]) == ([], None)
    done = run("merge", profile_file, "-o", tmp_path / "whole.safetensors", "--json", "-")
    found = json.loads(done.stdout)
    assert found["policy"] == str(tmp_path / "whole.safetensors")
    assert found["profile"] == {"runs": 3, "num_steps": T}
    assert "a profile of 3 runs" in done.stderr  # lines for people


def test_json_of_profile(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "profile.safetensors"
    command = ["profile", "emoji-flux", "--limit", 1, "--steps", STEPS, *SIZE, "-o", path]
    found = json.loads(run(*command, "--json", "-").stdout)
    assert found == {"policy": str(path), "profile": {"runs": 1, "num_steps": T}}


ALL = "calibrate check demo generate inspect merge profile refit report solve"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", ALL.split())
def test_a_bad_file_is_refused_before_any_work(
    name: str, policy_file: Path, tmp_path: Path, refused: Refused
) -> None:
    new = tmp_path / "new.safetensors"
    arguments = {
        "demo": ["-o", tmp_path / "demo"],
        "merge": [policy_file, "-o", new],
        "profile": ["emoji-flux", "-o", new],
        "report": [tmp_path / "bench.json", "-o", tmp_path / "page.html"],
        "solve": [policy_file, "--speedup", 2, "-o", new],
        "generate": ["emoji-flux", "a cat", "-o", tmp_path / "a.png"],
        "calibrate": ["emoji-flux", "-o", new],
        "check": ["emoji-flux", policy_file],
        "refit": [policy_file],
        "inspect": [policy_file],
    }[name]
    assert "call it values.json" in refused(name, *arguments, "--json", "values.txt")
