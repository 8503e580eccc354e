"""The verdict on plans: what is printed, and the exit code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.cli.policies import NOT_RECOMMENDED, print_verdicts
from ertacache.formats.fitted import FittedPlan, ValidationRow
from ertacache.formats.policy import Policy
from tests.cli.conftest import Run

FAST = ValidationRow("policy", 3, psnr=64.11, speedup=1.921, prompts=4)
SLOW = replace(FAST, speedup=1.0)
PATH = Path("q.safetensors")


@pytest.fixture(scope="module")
def plans(policy_file: Path) -> list[FittedPlan]:
    """A plan of speed-up 2 and one of 3, neither measured."""
    policy = Policy.load(policy_file)
    other = replace(policy.default.plan, compute_steps=(0, 3))
    return [policy.default, replace(policy.default, plan=other)]


def measured(plan: FittedPlan, row: ValidationRow, **changes: float) -> FittedPlan:
    return replace(plan, validation=(row,), **changes)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (FAST, "recommended: 1.92x faster, 64.1 dB PSNR to the full run"),
        (replace(FAST, psnr=math.inf), "recommended: 1.92x faster, identical to the full run"),
    ],
)
def test_a_recommended_plan(
    row: ValidationRow, line: str, plans: list[FittedPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_verdicts([measured(plans[0], row)], PATH) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [line, "", "q.safetensors: the policy"]


def test_a_plan_measured_on_its_calibration_prompts(
    plans: list[FittedPlan],
    policy_file: Path,
    tmp_path: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Table, verdict and ``inspect`` say that they are not held out."""
    plan, path = measured(plans[0], replace(FAST, prompts=2, heldout=False)), tmp_path / "q.st"
    print_verdicts([plan], PATH)
    title = "Measured on 2 calibration prompts with other seeds, not held out, to the full run"
    text = capsys.readouterr().out
    assert title in text
    assert "full run; measured on 2 calibration prompts with other seeds, not held out\n" in text
    replace(Policy.load(policy_file), plans=(plan,)).save(path)
    assert title in run("inspect", path).stdout


@pytest.mark.parametrize(
    ("rows", "ending", "code"),
    [
        ((FAST, FAST), "", 0),
        ((FAST, SLOW), ", not recommended at 3.00x", 0),
        ((SLOW, FAST), ", not recommended at 2.00x", 0),
        ((SLOW, SLOW), ", not recommended at 2.00x and 3.00x", NOT_RECOMMENDED),
        ((SLOW, None), ", not recommended at 2.00x", NOT_RECOMMENDED),
        ((FAST, None), "", 0),
        ((None, None), "", 0),
    ],
)
def test_which_plans_are_not_recommended(
    rows: tuple[ValidationRow | None, ...],
    ending: str,
    code: int,
    plans: list[FittedPlan],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [
        plan if row is None else measured(plan, row) for plan, row in zip(plans, rows, strict=True)
    ]
    assert print_verdicts(found, PATH, evaluations="profile 18 = 18") == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"q.safetensors: the policy{ending}"
    assert lines[-2] == "NFE           profile 18 = 18, one prompt on one step each"
    assert sum(line.startswith("recommended: ") for line in lines) == rows.count(FAST)
    assert sum(line.startswith("not recommended: ") for line in lines) == rows.count(SLOW)
    assert sum(line.startswith("validation    none") for line in lines) == rows.count(None)


def test_a_missed_target_is_an_exit_code_though_the_plan_is_recommended(
    plans: list[FittedPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    short = measured(plans[0], FAST, target_psnr=70.0)
    assert print_verdicts([short, measured(plans[1], FAST)], PATH) == NOT_RECOMMENDED == 3
    lines = capsys.readouterr().out.splitlines()
    assert "target missed: 70.0 dB asked for, 64.1 dB measured" in lines
    assert lines[-1] == "q.safetensors: the policy, target missed at 2.00x"
    both = measured(plans[0], SLOW, target_psnr=70.0)
    assert print_verdicts([both], PATH) == NOT_RECOMMENDED
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "q.safetensors: the policy, not recommended at 2.00x, target missed at 2.00x"


def test_a_policy_keeps_the_commands_that_made_it(
    profile_file: Path, policy_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    arguments = ["solve", policy_file, "--compute-steps", 4, "-o", path]
    assert run(*arguments).exit_code == 0
    commands = [Policy.load(file).provenance["command"] for file in (profile_file, policy_file)]
    assert commands[1].startswith(commands[0] + "\n")
    new = " ".join(map(str, ["ertacache", *arguments]))
    assert Policy.load(path).provenance["command"] == f"{commands[1]}\n{new}"
    lines = run("inspect", path).stdout.splitlines()
    begin = lines.index("command       " + commands[0])
    assert lines[begin + 2] == " " * 14 + new
