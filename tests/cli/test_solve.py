"""``solve``: plans from a profile, without a model."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.core.plans import PaperPlan
from ertacache.formats.policy import Policy
from tests.cli.conftest import Refused, Run, T

pytestmark = pytest.mark.usefixtures("no_model")


def budgets(path: Path) -> list[int]:
    return [len(plan.compute_steps) for plan in Policy.load(path).plans]


def test_a_plan_for_a_speedup(policy_file: Path, profile_file: Path) -> None:
    policy = Policy.load(policy_file)
    assert policy.default.method == "trajectory"
    assert budgets(policy_file) == [T // 2]
    assert policy.profile is not None
    assert policy.profile.num_runs == 3
    command = ["ertacache", "solve", str(profile_file), "--speedup", "2", "-o", str(policy_file)]
    assert policy.provenance["command"].split("\n")[-1] == shlex.join(command)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--compute-steps", 4], [4]),
        (["--speedup", 2, "--speedup", 3], [3, 2]),
        (["--compute-steps", 5, "--compute-steps", 2, "--compute-steps", 5], [2, 5]),
        (["--min-psnr", 1], [2]),
    ],
)
def test_other_targets(
    options: list[object], found: list[int], profile_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    result = run("solve", profile_file, *options, "-o", path)
    assert result.exit_code == 0, result.output
    assert sorted(budgets(path)) == sorted(found)
    assert all(plan.predicted_error is not None for plan in Policy.load(path).plans)
    assert result.stdout.count("method ") == len(found)
    assert result.stdout.splitlines()[-1] == f"{path}: the policy"


def test_new_plans_are_printed_and_the_others_stay(
    policy_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(policy_file.read_bytes())
    result = run("solve", path, "--speedup", 3, "-o", path)
    assert budgets(path) == [3, 2]
    assert result.stdout.count("method ") == 1
    assert ": 2 computed, 4 reused" in result.stdout
    result = run("solve", path, "--speedup", 2, "-o", path)  # in place of the one that is there
    assert sorted(budgets(path)) == [2, 3]
    assert result.stdout.count("method ") == 1
    assert ": 3 computed, 3 reused" in result.stdout
    result = run("solve", path, "--compute-steps", 2, "--compute-steps", 4, "-o", path)
    assert sorted(budgets(path)) == [2, 3, 4]
    assert result.stdout.count("method ") == 2


def test_the_options_of_the_paper(profile_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "q.safetensors"
    options = ["--threshold", 0.5, "--reuse", "velocity", "--no-adjust-timesteps", "--no-rectify"]
    result = run("solve", profile_file, "--method", "paper", *options, "-o", path)
    assert result.exit_code == 0
    found = Policy.load(path).default
    assert isinstance(found.plan, PaperPlan)
    assert found.plan.reuse == "velocity"
    assert found.plan.gain is None
    assert found.plan.sigmas.equal(found.sigmas)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --speedup, --compute-steps, --min-psnr or --threshold"),
        (["--speedup", "2", "--compute-steps", "3"], "not --speedup and --compute-steps"),
        (["--speedup", "2", "--speedup", "50"], "speedup must be between 1 and 3, got 50"),
        (["--compute-steps", "99"], f"cannot compute 99 of {T} steps"),
        (["--min-psnr", "900"], "no plan is predicted to reach 900 dB; the best is"),
        (["--threshold", "0.1"], "--threshold needs --method paper"),
        (["--threshold", "0", "--speedup", "2"], "not --speedup and --threshold"),
        (["--method", "paper", "--min-psnr", "40"], "predicts no error"),
    ],
)
def test_a_target_that_cannot_be_reached(
    options: list[str], words: str, profile_file: Path, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "q.safetensors"
    assert words in refused("solve", profile_file, *options, "-o", path)
    assert not path.exists()


def test_files_without_a_profile(
    profile_file: Path, policy_file: Path, tmp_path: Path, refused: Refused
) -> None:
    damaged, output = tmp_path / "damaged.safetensors", tmp_path / "q.safetensors"
    damaged.write_bytes(profile_file.read_bytes()[:-8])
    bare = tmp_path / "bare.safetensors"
    replace(Policy.load(policy_file), profile=None).save(bare)
    before = policy_file.read_bytes()
    for path in (damaged, tmp_path, tmp_path / "absent"):
        assert str(path) in refused("solve", path, "--speedup", 2, "-o", output)
    assert "the policy has no profile" in refused("solve", bare, "--speedup", 2, "-o", output)
    assert refused("solve", damaged, "--speedup", 2, "-o", policy_file)
    assert refused("solve", profile_file, "--speedup", 2, "-o", damaged)
    assert policy_file.read_bytes() == before
    assert not output.exists()


def test_a_measured_policy_is_overwritten_by_force_only(
    profile_file: Path, calibrated_file: Path, tmp_path: Path, run: Run, refused: Refused
) -> None:
    path, link = tmp_path / "q.safetensors", tmp_path / "link.safetensors"
    path.write_bytes(calibrated_file.read_bytes())
    link.symlink_to(path)
    other = tmp_path / "other.safetensors"  # of other runs
    policy = Policy.load(profile_file)
    assert policy.profile is not None
    runs = tuple(replace(run, seed=run.seed + 100) for run in policy.profile.runs)
    replace(policy, profile=replace(policy.profile, runs=runs)).save(other)
    for source, output, lost in (
        (profile_file, path, "1 measured plan"),
        (other, link, "3 runs of a profile, 1 measured plan"),
    ):
        line = refused("solve", source, "--speedup", 2, "-o", output)
        assert f"{str(output)!r} holds {lost}, which would be lost" in line
        assert "--force" in line
    assert path.read_bytes() == calibrated_file.read_bytes()
    assert run("solve", other, "--speedup", 2, "--force", "-o", link).exit_code == 0
    assert link.is_symlink()
    assert Policy.load(path).default.measured is None


def test_a_measured_policy_is_extended_in_place(
    calibrated_file: Path, tmp_path: Path, run: Run, refused: Refused
) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(calibrated_file.read_bytes())
    assert run("solve", path, "--speedup", 3, "-o", path).exit_code == 0
    assert sorted(budgets(path)) == [2, 3]
    # The same budget as that of the measured plan, which a solved one would replace.
    assert "holds 1 measured plan" in refused("solve", path, "--speedup", 2, "-o", path)
