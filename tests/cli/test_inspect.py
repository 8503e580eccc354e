"""``inspect``: what it shows of a policy and of a profile, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.core.frontier import MeasuredFit
from ertacache.core.groups import Groups, GroupStatistics
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy
from ertacache.integration.solve import PlanSolver
from tests.cli.conftest import Refused, Run, T

pytestmark = pytest.mark.usefixtures("no_model")


def mask(steps: tuple[int, ...]) -> str:
    return "".join("█" if k in steps else "·" for k in range(T))


def frontier(text: str) -> dict[int, list[str]]:
    """The rows of the frontier by their number of computed steps."""
    rows = [line.split() for line in text.split("Frontier: ")[1].splitlines()]
    return {int(row[0]): row for row in rows if row and row[0].isdigit()}


def test_inspect_a_policy(policy_file: Path, run: Run) -> None:
    plan = Policy.load(policy_file).default
    text = run("inspect", policy_file).stdout
    assert f"step mask     {mask(plan.compute_steps)}\n" in text
    assert f"profile       a profile of 3 runs of {T} steps\n" in text
    for words in ("trajectory", "FluxPipeline", "ertacache solve", "shift=", "guidance_scale 3.5"):
        assert words in text
    assert "validation    none: not measured on held-out prompts" in text
    assert "output 1" not in text
    text = run("inspect", policy_file, "--coefficients").stdout
    assert isinstance(plan.plan, TrajectoryPlan)
    assert f"{plan.plan.coefficients[-1, 0, 1].item():.6f}" in text


def test_inspect_the_paper(paper_file: Path, profile_file: Path, run: Run) -> None:
    text = run("inspect", paper_file, "--coefficients").stdout
    assert "method        paper" in text
    assert "gain" in text
    assert frontier(text) == frontier(run("inspect", profile_file).stdout)


def test_inspect_shows_what_was_measured(calibrated_file: Path, run: Run) -> None:
    text = run("inspect", calibrated_file).stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["policy", "3", "1.90x", "46.5", "dB"] in lines
    assert ["plain", "reuse", "3", "2.00x", "identical"] in lines
    # 12 dB - 20 log10(0.0125) = 50.1 dB: the unit and the error of the file.
    plan = Policy.load(calibrated_file).default
    row = ["3", "2.00x", "0.0125", "50.1", "dB", "46.5", "dB", mask(plan.compute_steps)]
    rows = frontier(text)
    assert rows.pop(3) == row
    assert rows.pop(T)[2:4] == ["0", "identical"]  # every step computed
    assert all(len(others) == len(row) - 2 for others in rows.values())  # predicted only


def test_inspect_a_profile_and_its_frontier(profile_file: Path, run: Run) -> None:
    text = run("inspect", profile_file).stdout
    policy = Policy.load(profile_file)
    assert policy.profile is not None
    assert policy.profile.runs[0].prompt in text
    rows = frontier(text)
    assert list(rows) == list(range(2, T + 1))
    solver = PlanSolver(policy)
    for known in solver.known:
        computed, error = len(known.compute_steps), known.predicted_error
        psnr = [f"{solver.psnr(error):.1f}", "dB"] if computed < T else ["identical"]
        fewer, steps = f"{T / computed:.2f}x", mask(known.compute_steps)
        assert rows[computed] == [str(computed), fewer, f"{error:.3g}", *psnr, steps]
    assert "predictions were not calibrated on the network: run ertacache calibrate" in text
    assert "\nmethod" not in text


def test_inspect_a_policy_without_a_profile(policy_file: Path, tmp_path: Path, run: Run) -> None:
    bare = tmp_path / "bare.safetensors"
    replace(Policy.load(policy_file), profile=None).save(bare)
    text = run("inspect", bare).stdout
    assert "profile       no profile\n" in text
    assert "Frontier" not in text


def line_of(text: str, name: str) -> list[str]:
    """The values of the facts of one name."""
    return [line[14:] for line in text.splitlines() if line.startswith(f"{name:<14}")]


def test_inspect_shows_the_groups_of_a_profile(
    profile_file: Path, tmp_path: Path, run: Run
) -> None:
    policy = Policy.load(profile_file)
    assert policy.profile is not None
    assert line_of(run("inspect", profile_file).stdout, "groups") == [str(policy.profile.finest)]
    finest = Groups(channels=16, bands=3)
    products = torch.zeros(8, finest.count, T + 1, T + 1, dtype=torch.float64)
    counts = torch.bincount(torch.tensor(policy.profile.folds), minlength=8)
    path = tmp_path / "p.safetensors"
    for by_group, words in (
        (GroupStatistics(finest, products, counts), "16 channels x 3 bands"),
        (None, "one group: the layout of the latent is not known"),
    ):
        replace(policy, profile=replace(policy.profile, by_group=by_group)).save(path)
        assert line_of(run("inspect", path).stdout, "groups") == [words]


def test_inspect_shows_groups_and_second_history_of_a_plan(
    policy_file: Path, tmp_path: Path, run: Run
) -> None:
    policy, path = Policy.load(policy_file), tmp_path / "p.safetensors"
    groups, steps = Groups(channels=2, bands=2), policy.default.compute_steps
    z = torch.arange(T * 4 * 5, dtype=torch.float64).view(T, 4, 5)
    z[:, :, 0] = 1
    divided = TrajectoryPlan(steps, z, groups, branch=True)
    one = TrajectoryPlan(steps, z[:, :1, :2])
    plans = tuple(replace(policy.default, plan=plan) for plan in (divided, one))
    Policy(policy.fingerprint, plans=plans).save(path)
    text = run("inspect", path).stdout
    assert line_of(text, "groups") == ["2 channels x 2 bands", "one group"]
    assert line_of(text, "history") == [
        "the last 2 computed outputs, and of one guidance branch as many before guidance",
        "the last computed output",
    ]
    assert "channel 1 of 2" not in text
    text = run("inspect", path, "--coefficients").stdout
    words = text.split()
    for group, name in enumerate(
        [f"channel {c} of 2, band {b} of 2" for b in (1, 2) for c in (1, 2)]
    ):
        assert f"the newest first, {name}\n" in text
        assert all(f"{z[0, group, j]:.6f}" in words for j in range(5))
    assert text.count("branch 2") == 4  # one table per group
    assert text.count("the newest first\n") == 1


def test_inspect_shows_order_and_groups_of_the_fits(
    profile_file: Path, tmp_path: Path, run: Run
) -> None:
    policy, path = Policy.load(profile_file), tmp_path / "p.safetensors"
    assert "Fits: " not in run("inspect", profile_file).stdout
    assert policy.profile is not None
    finest = policy.profile.finest
    assert finest is not None
    fits = (
        MeasuredFit(2, Fit(3, 0.1, 1.0, 2, finest), 1.5, uniform=True),
        MeasuredFit(4, Fit(4, 1e-3), 1.25),
    )
    replace(policy, fits=fits).save(path)
    text = run("inspect", path).stdout
    rows = [line.split() for line in text.split("Fits: ")[1].split("order: of")[0].splitlines()]
    assert ["computed", "history", "ridge", "order", "groups", "schedule", "error", "ratio"] in rows
    assert ["2", "3", "0.1", "2", *str(finest).split(), "uniform", "1.50"] in rows
    assert ["4", "4", "0.001", "0", "one", "group", "searched", "1.25"] in rows


def test_inspect_refuses_what_is_not_there(
    profile_file: Path, tmp_path: Path, refused: Refused
) -> None:
    assert "only a plan has coefficients" in refused("inspect", profile_file, "--coefficients")
    assert "No such file" in refused("inspect", tmp_path / "absent")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(profile_file.read_bytes()[:-8])
    assert "bytes" in refused("inspect", damaged)
    damaged.write_bytes(b"not one of ours")
    assert "cannot load" in refused("inspect", damaged)
