"""``solve`` and ``inspect``: from a profile to a policy and what they show, without a model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ertacache.cli import app
from ertacache.core.plan import PaperPlan
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile
from tests.cli.conftest import STEPS, Run

Refused = Callable[..., str]
T = int(STEPS)


def test_a_policy_for_a_speedup(policy_file: Path, profile_file: Path) -> None:
    policy = Policy.load(policy_file)
    assert policy.method == "trajectory"
    assert len(policy.compute_steps) == T // 2
    assert policy.provenance["command"] == shlex.join(
        ["ertacache", "solve", str(profile_file), "--speedup", "2", "-o", str(policy_file)]
    )


def test_other_wishes(profile_file: Path, tmp_path: Path, run: Run) -> None:
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
        ([], "give exactly one of"),
        (["--speedup", "2", "--compute-steps", "3"], "give exactly one of"),
        (["--speedup", "50"], "speedup must be between"),
        (["--compute-steps", "99"], "budgets must lie between"),
        (["--max-error", "0"], "no plan is expected to stay within"),
        (["--min-psnr", "900"], "no plan is expected to reach 900 dB"),
        (["--threshold", "0.1"], "a threshold is the paper's"),
        (["--method", "paper", "--max-error", "1"], "predicts no error"),
    ],
)
def test_a_wish_that_cannot_be_granted(
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


def test_inspect_a_policy(policy_file: Path, run: Run) -> None:
    policy = Policy.load(policy_file)
    text = run("inspect", policy_file).stdout
    strip = "".join("█" if k in policy.compute_steps else "·" for k in range(T))
    assert f"schedule      {strip}\n" in text
    for words in ("trajectory", "FluxPipeline", "embedded, 3 prompts", "ertacache solve", "shift="):
        assert words in text
    assert "output 1" not in text
    text = run("inspect", policy_file, "--coefficients").stdout
    assert f"{policy.plan.outputs[-1, 0].item():.6f}" in text  # type: ignore[union-attr]


def test_inspect_the_paper(paper_file: Path, run: Run) -> None:
    text = run("inspect", paper_file, "--coefficients").stdout
    assert "method        paper" in text
    assert "gain" in text


def test_inspect_shows_what_was_measured(policy_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "q.safetensors"
    rows = (
        ValidationRow("policy", 3, psnr=46.54, speedup=1.9, prompts=24),
        ValidationRow("plain reuse", 3, psnr=float("inf"), speedup=2, prompts=24),
    )
    replace(Policy.load(policy_file), validation=rows).save(path)
    lines = [line.split() for line in run("inspect", path).stdout.splitlines()]
    assert ["policy", "3", "1.90x", "46.5", "dB"] in lines
    assert ["plain", "reuse", "3", "2.00x", "identical"] in lines


def test_inspect_a_profile_and_its_frontier(profile_file: Path, run: Run) -> None:
    text = run("inspect", profile_file, "--frontier").stdout
    assert Profile.load(profile_file).prompts[0].prompt in text
    budgets = [line.split()[0] for line in text.splitlines() if line.endswith(("█ ", "· "))]
    assert budgets == [str(n) for n in range(2, T + 1)]


def test_inspect_refuses_what_is_not_there(
    policy_file: Path, profile_file: Path, tmp_path: Path, refused: Refused
) -> None:
    bare = tmp_path / "bare.safetensors"
    replace(Policy.load(policy_file), profile=None).save(bare)
    assert "no profile in it" in refused("inspect", bare, "--frontier")
    assert "only a policy has coefficients" in refused("inspect", profile_file, "--coefficients")
    assert "No such file" in refused("inspect", tmp_path / "absent")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(profile_file.read_bytes()[:-8])
    assert "bytes" in refused("inspect", damaged)
    damaged.write_bytes(b"not one of ours")
    assert "cannot load" in refused("inspect", damaged)


def test_colour_only_where_it_is_wanted(policy_file: Path, run: Run) -> None:
    arguments = ["inspect", policy_file, "--coefficients"]
    assert "\x1b" not in run(*arguments).output
    assert "\x1b[32m" in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": None}).stdout
    assert "\x1b" not in run(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).output


def test_output_without_unicode(policy_file: Path) -> None:
    result = CliRunner(charset="ascii").invoke(app, ["inspect", str(policy_file), "--frontier"])
    assert result.exit_code == 0
    assert "#." in result.stdout


def test_texts_of_a_file_cannot_reach_the_terminal(
    policy_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    replace(Policy.load(policy_file), provenance={"note": "\x1b[2Jgone\nnew line"}).save(path)
    text = run("inspect", path).stdout
    assert "\x1b" not in text
    assert "note          \\x1b[2Jgone new line\n" in text
