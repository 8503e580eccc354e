"""``inspect``: what it shows of a policy and of a profile, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile
from tests.cli.conftest import Refused, Run, T


def test_inspect_a_policy(policy_file: Path, run: Run) -> None:
    policy = Policy.load(policy_file)
    text = run("inspect", policy_file).stdout
    mask = "".join("█" if k in policy.compute_steps else "·" for k in range(T))
    assert f"step mask     {mask}\n" in text
    for words in ("trajectory", "FluxPipeline", "embedded, 3 prompts", "ertacache solve", "shift="):
        assert words in text
    assert "output 1" not in text
    text = run("inspect", policy_file, "--coefficients").stdout
    assert f"{policy.plan.coefficients[-1, 0, 1].item():.6f}" in text  # type: ignore[union-attr]


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
