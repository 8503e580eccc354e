"""``solve``: from a profile to a policy, without a model."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ertacache.core.plans import PaperPlan
from ertacache.formats.policy import Policy
from tests.cli.conftest import Refused, Run, T


def test_a_policy_for_a_speedup(policy_file: Path, profile_file: Path) -> None:
    policy = Policy.load(policy_file)
    assert policy.method == "trajectory"
    assert len(policy.compute_steps) == T // 2
    assert policy.provenance["command"] == shlex.join(
        ["ertacache", "solve", str(profile_file), "--speedup", "2", "-o", str(policy_file)]
    )


def test_other_targets(profile_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "q.safetensors"
    assert run("solve", profile_file, "--compute-steps", 4, "-o", path).exit_code == 0
    found = Policy.load(path)
    assert len(found.compute_steps) == 4
    assert found.predicted_error is not None
    result = run("solve", profile_file, "--max-error", found.predicted_error, "-o", path)
    assert len(Policy.load(path).compute_steps) <= 4
    assert str(path) in result.stdout.splitlines()[-1]


def test_the_options_of_the_paper(profile_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "q.safetensors"
    options = ["--threshold", 0.5, "--reuse", "velocity", "--no-adjust-timesteps", "--no-rectify"]
    result = run("solve", profile_file, "--method", "paper", *options, "-o", path)
    assert result.exit_code == 0
    policy = Policy.load(path)
    assert isinstance(policy.plan, PaperPlan)
    assert policy.plan.reuse == "velocity"
    assert policy.plan.gain is None
    assert policy.plan.sigmas.equal(policy.sigmas)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give exactly one of --speedup"),
        (["--speedup", "2", "--compute-steps", "3"], "give exactly one of"),
        (["--speedup", "50"], "speedup must be between"),
        (["--compute-steps", "99"], "budgets must lie between"),
        (["--max-error", "0"], "no plan has a predicted error within"),
        (["--min-psnr", "900"], "no plan is predicted to reach 900 dB"),
        (["--threshold", "0.1"], "--threshold needs --method paper"),
        (["--method", "paper", "--max-error", "1"], "predicts no error"),
    ],
)
def test_a_target_that_cannot_be_reached(
    options: list[str], words: str, profile_file: Path, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "q.safetensors"
    assert words in refused("solve", profile_file, *options, "-o", path)
    assert not path.exists()


def test_files_that_are_no_profile(
    profile_file: Path, policy_file: Path, tmp_path: Path, refused: Refused
) -> None:
    damaged, output = tmp_path / "damaged.safetensors", tmp_path / "q.safetensors"
    damaged.write_bytes(profile_file.read_bytes()[:-8])
    before = policy_file.read_bytes()
    for path in (damaged, policy_file, tmp_path, tmp_path / "absent"):
        assert str(path) in refused("solve", path, "--speedup", 2, "-o", output)
    assert str(profile_file) in refused("solve", profile_file, "--speedup", 2, "-o", profile_file)
    assert refused("solve", damaged, "--speedup", 2, "-o", policy_file)
    assert policy_file.read_bytes() == before
    assert not output.exists()
