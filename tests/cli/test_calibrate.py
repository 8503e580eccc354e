"""``calibrate``: the policy, the verdict and its exit code."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.calibration import calibrate, validate
from ertacache.core.plans import PaperPlan
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile
from tests.cli.conftest import Refused, Run


def test_calibrate_measures_and_keeps_everything(
    tmp_path: Path, prompts_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The verdict depends on measured time.
    monkeypatch.setattr(validate, "recommend", lambda rows: validate.Verdict(True, "as if"))
    path, profile = tmp_path / "q.safetensors", tmp_path / "p.safetensors"
    options = ["--limit", 2, "--steps", 4, "--height", 32, "--width", 32]
    options += ["--speedup", 2, "--profile", profile]
    result = run("calibrate", "emoji-flux", *options, "--heldout", prompts_file, "-o", path)
    assert result.exit_code == 0, result.output
    policy = Policy.load(path)
    assert [row.method for row in policy.validation] == ["policy", "plain reuse", "fewer steps"]
    assert {row.prompts for row in policy.validation} == {2}
    assert policy.provenance["command"].startswith("ertacache calibrate emoji-flux --limit 2")
    assert Profile.load(profile).num_prompts == 2
    assert "Measured on 2 held-out prompts" in result.stdout
    assert "\nrecommended: as if\n" in result.stdout
    # Two prompts of four steps; one evaluates the policy, then the candidates; two are validated.
    refit = re.search(
        r"^NFE +profile 8 \+ refit (\d+) \+ validation 20 = (\d+), one prompt", result.stdout, re.M
    )
    assert refit is not None
    assert int(refit[2]) == 8 + int(refit[1]) + 20
    assert f"refit {refit[1]} + validation 20" in policy.provenance["network calls"]
    assert result.stdout.splitlines()[-1] == f"{path}: the policy"
    assert result.stderr == ""


def test_exit_code_3_when_not_recommended(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = validate.Verdict(False, "4 steps are few")
    monkeypatch.setattr(validate, "recommend", lambda rows: few)
    path = tmp_path / "q.safetensors"
    options = ["--limit", 2, "--steps", 4, "--threshold", 0.5, "--method", "paper"]
    options += ["--reuse", "velocity", "--no-adjust-timesteps", "--no-rectify"]
    result = run("calibrate", "emoji-flux", *options, "--no-refit", "-o", path)
    assert result.exit_code == 3
    plan = Policy.load(path).plan
    assert isinstance(plan, PaperPlan)
    assert (plan.reuse, plan.gain) == ("velocity", None)
    assert "not recommended: 4 steps are few\n" in result.stdout
    assert result.stdout.splitlines()[-1] == f"{path}: the policy, not recommended"


@pytest.mark.parametrize(("measured", "code"), [(44.9, 3), (45.0, 0)])
def test_a_target_psnr_is_reached_or_missed(
    measured: float,
    code: int,
    tmp_path: Path,
    policy_file: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, object] = {}

    def made(*_: object, **arguments: object) -> Policy:
        given.update(arguments)
        rows = (ValidationRow("policy", 3, psnr=measured, speedup=2.0, prompts=4),)
        return replace(Policy.load(policy_file), validation=rows, target_psnr=45.0)

    monkeypatch.setattr(calibrate, "calibrate", made)
    path = tmp_path / "q.safetensors"
    options = ["--min-psnr", 45, "--refit-prompts", 3, "--batch-size", 2]
    result = run("calibrate", "emoji-flux", *options, "-o", path)
    assert result.exit_code == code
    short = "target missed: 45.0 dB asked for, 44.9 dB measured\n" in result.stdout
    assert short == (code == 3)
    ending = ", the closest of those tried" if code else ""
    assert result.stdout.splitlines()[-1] == f"{path}: the policy{ending}"
    assert (given["min_psnr"], given["refit_prompts"], given["batch_size"]) == (45.0, 3, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give exactly one of"),
        (["--speedup", "2", "--max-error", "1"], "give exactly one of"),
        (["--max-error", "1", "--method", "paper"], "predicts no error"),
        (["--min-psnr", "40", "--method", "paper"], "predicts no error"),
        (["--min-psnr", "40", "--speedup", "2"], "--max-error, --min-psnr and --threshold"),
        (["--threshold", "0.1"], "--threshold needs --method paper"),
        (["--speedup", "2", "--heldout", "absent.txt"], "cannot read prompts"),
        (["--speedup", "90"], "speedup must be between"),
        (["--compute-steps", "90"], "cannot compute 90 of 30 steps"),
        (["--speedup", "2", "--profile", "{output}"], "must be different files"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    options: list[str],
    words: str,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda *a, **k: pytest.fail("it began"))
    path = tmp_path / "q.safetensors"
    given = [option.format(output=path) for option in options]
    assert words in refused("calibrate", "emoji-flux", *given, "-o", path)
    assert not path.exists()


def test_an_interrupt_leaves_the_old_policy(
    tmp_path: Path, policy_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupt)
    path = tmp_path / "q.safetensors"
    path.write_bytes(policy_file.read_bytes())
    result = run("calibrate", "emoji-flux", "--speedup", 2, "-o", path)
    assert result.exit_code == 130
    assert result.stderr == "interrupted: nothing was written\n"
    assert path.read_bytes() == policy_file.read_bytes()
