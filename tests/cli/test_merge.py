"""``merge``: the runs of several profiles, each once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.formats.policy import Policy
from tests.cli.conftest import STEPS, Refused, Run


@pytest.fixture
def part(profile_file: Path, tmp_path: Path) -> Path:
    """The same profile as if its runs had other seeds."""
    policy = Policy.load(profile_file)
    assert policy.profile is not None
    runs = tuple(replace(run, seed=run.seed + 100) for run in policy.profile.runs)
    path = tmp_path / "part.safetensors"
    replace(policy, profile=replace(policy.profile, runs=runs)).save(path)
    return path


def test_merge(tmp_path: Path, profile_file: Path, run: Run, refused: Refused) -> None:
    part, whole = tmp_path / "part.safetensors", tmp_path / "whole.safetensors"
    options = ["--limit", 1, "--steps", STEPS, "--seed", 100]
    assert run("profile", "emoji-flux", *options, "-o", part).exit_code == 0
    result = run("merge", profile_file, part, "-o", whole)
    assert result.stdout == f"{whole}: a profile of 4 runs of {STEPS} steps\n"
    merged = Policy.load(whole)
    assert merged.profile is not None
    assert [run.seed for run in merged.profile.runs] == [0, 1, 2, 100]
    assert merged.provenance["model"] == "emoji-flux"
    before = whole.read_bytes()
    assert "share a run" in refused("merge", whole, part, "-o", whole)
    assert whole.read_bytes() == before


def test_plans_are_left_out(calibrated_file: Path, part: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "q.safetensors"
    assert run("merge", part, calibrated_file, "-o", path).exit_code == 0
    assert Policy.load(path).plans == ()


def test_profiles_of_different_runs(
    profile_file: Path, policy_file: Path, part: Path, tmp_path: Path, refused: Refused
) -> None:
    path, other = tmp_path / "q.safetensors", tmp_path / "other.safetensors"
    policy = Policy.load(part)
    replace(policy, fingerprint=replace(policy.fingerprint, dtype="bfloat16")).save(other)
    line = refused("merge", profile_file, other, "-o", path)
    assert "different runs cannot be merged: dtype is 'bfloat16', was 'float32'" in line
    replace(Policy.load(policy_file), profile=None).save(other)
    assert "without a profile cannot be merged" in refused("merge", part, other, "-o", path)
    assert not path.exists()


def test_a_measured_policy_is_overwritten_by_force_only(
    profile_file: Path,
    calibrated_file: Path,
    part: Path,
    tmp_path: Path,
    run: Run,
    refused: Refused,
) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(calibrated_file.read_bytes())
    line = refused("merge", path, part, "-o", path)
    assert f"{str(path)!r} holds 1 measured plan, which would be lost" in line
    assert "--force" in line
    assert path.read_bytes() == calibrated_file.read_bytes()
    assert run("merge", path, part, "--force", "-o", path).exit_code == 0
    # A profile is extended in place, and not replaced by a part of it.
    assert "holds 3 runs of a profile" in refused("merge", part, "-o", path)
    path.write_bytes(profile_file.read_bytes())
    assert run("merge", path, part, "-o", path).exit_code == 0
