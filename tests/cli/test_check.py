"""``check``: the table, the recommendation, its exit code, and what is refused before any work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.formats.policy import Policy
from tests.cli.conftest import STEPS, Refused, Run, T, messages
from tests.hubserver import Hub
from tests.hubserver import hub as hub  # a fixture

SIZE = ["--height", 32, "--width", 32]


@pytest.fixture(scope="session")
def modest_file(calibrated_file: Path) -> Path:
    """A policy that promises next to nothing."""
    path, policy = calibrated_file.with_name("modest.safetensors"), Policy.load(calibrated_file)
    (own, *others) = policy.default.validation
    rows = (replace(own, psnr=5.0), *others)
    replace(policy, plans=(replace(policy.default, validation=rows),)).save(path)
    return path


def test_what_is_measured_and_printed(modest_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "check.json"
    options = [*SIZE, "--limit", 2, "--batch-size", 2, "--json", path]
    result = run("check", "emoji-flux", modest_file, *options)
    assert result.exit_code == 0, result.output
    assert "Measured on 2 held-out prompts, to the full run of this pipeline" in result.stdout
    assert "5.0 dB, measured" in result.stdout
    half = T // 2
    assert f"\n{half} of {STEPS} steps: keep the policy: " in result.stdout
    (row,) = json.loads(path.read_text())
    assert row["expected_psnr"] == 5.0
    assert (row["computed_steps"], row["num_steps"], row["failed"]) == (half, T, False)
    assert not any(line.startswith(("warning", "error")) for line in messages(result))


def test_exit_code_3_when_it_lost(modest_file: Path, tmp_path: Path, run: Run) -> None:
    path, policy = tmp_path / "bold.safetensors", Policy.load(modest_file)
    (own, *others) = policy.default.validation
    rows = (replace(own, psnr=99.0), *others)
    replace(policy, plans=(replace(policy.default, validation=rows),)).save(path)
    options = [*SIZE, "--limit", 1, "--arg", "true_cfg_scale=7"]
    result = run("check", "emoji-flux", path, *options)
    assert result.exit_code == 3
    assert "calibrate again on this pipeline: " in result.stdout
    assert any("true_cfg_scale is 7.0, was 2.0" in line for line in messages(result))


def test_a_policy_of_the_hub(modest_file: Path, hub: Hub, run: Run, refused: Refused) -> None:
    hub.add("ada/policy", {"policy.safetensors": modest_file.read_bytes()})
    result = run("check", "emoji-flux", "hub:ada/policy", *SIZE, "--limit", 1, "--speedup", 3)
    assert result.exit_code in (0, 3), result.output
    assert f"2 of {STEPS} steps: " in result.stdout
    assert "hub:ada/policy" in run("inspect", "hub:ada/policy").stdout
    for command in ("check", "generate"):
        place = ["hub:ada/absent"] if command == "check" else ["cat", "--policy", "hub:ada/absent"]
        line = refused(command, "emoji-flux", *place, *(["-o", "x.png"] * (command == "generate")))
        assert line.startswith("error: cannot load 'hub:ada/absent': there is no such repository")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speedup", "0"], "--speedup must be a finite number of at least 1"),
        (["--json", "check.txt"], "cannot write 'check.txt': call it check.json"),
        (["--json", "absent/check.json"], "there is no folder 'absent'"),
        (["--int8"], '--int8 needs torchao: pip install "ertacache[quantize]"'),
        (["--lora", "style.bin"], "'style.bin' may run code: convert it to a .safetensors file"),
        (["--prompts", "absent.txt"], "cannot read prompts from 'absent.txt'"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_bad_input(
    options: list[str],
    words: str,
    modest_file: Path,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ertacache.cli.check.find_spec", lambda name: None)
    Path("style.bin").write_bytes(b"")
    assert words in refused("check", "emoji-flux", modest_file, *options)


@pytest.mark.usefixtures("no_model")
def test_policies_that_cannot_be_checked(
    profile_file: Path, tmp_path: Path, refused: Refused
) -> None:
    assert "holds no plan: give --speedup" in refused("check", "emoji-flux", profile_file)
    assert "cannot load" in refused("check", "emoji-flux", tmp_path / "absent.safetensors")
    assert "comes with no prompts" in refused("check", "./mine", profile_file, "--speedup", 2)


def test_a_lora_that_is_none(modest_file: Path, tmp_path: Path, run: Run) -> None:
    lora = tmp_path / "style.safetensors"
    lora.write_bytes(modest_file.read_bytes())
    result = run("check", "emoji-flux", modest_file, "--lora", lora)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert "LoRA" in messages(result)[-1]
