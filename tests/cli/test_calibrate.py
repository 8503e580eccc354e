"""``calibrate``: the policy, the verdict and its exit code."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration import calibrate, validate
from ertacache.calibration.sharing import taking_up
from ertacache.core.plans import PaperPlan
from ertacache.distributed import ALONE
from ertacache.formats.parts import Parts
from ertacache.formats.policy import Policy, PolicyError, ValidationRow
from ertacache.models import zoo
from tests.cli.conftest import Refused, Run, T, messages
from tests.hubserver import TOKEN, Hub
from tests.hubserver import hub as hub  # a fixture


@pytest.fixture
def given(policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the calibration, which is not run."""
    arguments: dict[str, Any] = {}

    def made(*_: object, **values: object) -> Policy:
        arguments.update(values)
        return Policy.load(policy_file)

    monkeypatch.setattr(calibrate, "calibrate", made)
    return arguments


def test_calibrate_measures_and_keeps_everything(
    tmp_path: Path, prompts_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The verdict depends on measured time.
    monkeypatch.setattr(validate, "recommend", lambda rows: validate.Verdict(True, "as if"))
    path, profile = tmp_path / "q.safetensors", tmp_path / "p.safetensors"
    options = ["--limit", 2, "--steps", 4, "--height", 32, "--width", 32]
    options += ["--speedup", 2, "--speedup", 1.3, "--profile", profile]
    result = run("calibrate", "emoji-flux", *options, "--heldout", prompts_file, "-o", path)
    assert result.exit_code == 0, result.output
    policy = Policy.load(path)
    assert [len(plan.compute_steps) for plan in policy.plans] == [2, 3]
    for plan in policy.plans:
        assert [row.method for row in plan.validation] == ["policy", "plain reuse", "fewer steps"]
        assert {row.prompts for row in plan.validation} == {2}
    assert policy.provenance["command"].startswith("ertacache calibrate emoji-flux --limit 2")
    assert policy.provenance["model"] == "emoji-flux"
    kept = Policy.load(profile)
    assert kept.plans == ()
    assert kept.profile is not None
    assert kept.profile.num_runs == 2
    assert result.stdout.count("Measured on 2 held-out prompts") == 2
    assert result.stdout.count("\nrecommended: as if\n") == 2
    # Two prompts of four steps; trials and refits; two prompts are validated in seven variants.
    nfe = re.search(
        r"^NFE +profile 8 \+ trial (\d+) \+ refit (\d+) \+ validation 38 = (\d+), one prompt",
        result.stdout,
        re.M,
    )
    assert nfe is not None
    assert int(nfe[3]) == 8 + int(nfe[1]) + int(nfe[2]) + 38
    assert f"refit {nfe[2]} + validation 38" in policy.provenance["network calls"]
    assert result.stdout.splitlines()[-1] == f"{path}: the policy"
    assert messages(result) == []


def test_exit_code_3_when_not_recommended(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = validate.Verdict(False, "4 steps are few")
    monkeypatch.setattr(validate, "recommend", lambda rows: few)
    path = tmp_path / "q.safetensors"
    options = ["--limit", 2, "--steps", 4, "--compute-steps", 2, "--method", "paper"]
    options += ["--reuse", "velocity", "--no-adjust-timesteps", "--no-rectify"]
    result = run("calibrate", "emoji-flux", *options, "--no-refit", "-o", path)
    assert result.exit_code == 3
    plan = Policy.load(path).default.plan
    assert isinstance(plan, PaperPlan)
    assert (plan.reuse, plan.gain) == ("velocity", None)
    assert "not recommended: 4 steps are few\n" in result.stdout
    speedup = 4 / len(plan.compute_steps)
    last = f"{path}: the policy, not recommended at {speedup:.2f}x"
    assert result.stdout.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ([], "speedup", None),  # the library has a default
        (["--speedup", "2", "--speedup", "5"], "speedup", [2.0, 5.0]),
        (["--compute-steps", "15", "--compute-steps", "7"], "compute_steps", [15, 7]),
        (["--min-psnr", "45"], "min_psnr", 45.0),
        (["--method", "paper", "--threshold", "0"], "threshold", 0.0),
        (["--arg", "true_cfg_scale=[2,4]"], "true_cfg_scale", [2, 4]),
        (["--refit-prompts", "3"], "refit_prompts", 3),
        (["--no-refit"], "refit", False),
        (["--no-validate"], "heldout", []),
        (["--batch-size", "2"], "batch_size", 2),
    ],
)
def test_what_is_handed_on(
    options: list[str], name: str, value: object, tmp_path: Path, run: Run, given: dict[str, Any]
) -> None:
    result = run("calibrate", "emoji-flux", *options, "-o", tmp_path / "q.safetensors")
    assert result.exit_code == 0, result.output
    targets = ("speedup", "compute_steps", "min_psnr", "threshold")
    assert given[name] == value
    assert all(given[other] is None for other in targets if other != name)


@pytest.mark.parametrize(("measured", "code"), [(44.9, 3), (45.0, 0)])
def test_a_target_psnr_is_reached_or_missed(
    measured: float,
    code: int,
    tmp_path: Path,
    policy_file: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy.load(policy_file)
    rows = (ValidationRow("policy", T // 2, psnr=measured, speedup=2.0, prompts=4),)
    plan = replace(policy.default, validation=rows, target_psnr=45.0)
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: replace(policy, plans=(plan,)))
    path = tmp_path / "q.safetensors"
    result = run("calibrate", "emoji-flux", "--min-psnr", 45, "-o", path)
    assert result.exit_code == code
    short = "target missed: 45.0 dB asked for, 44.9 dB measured\n" in result.stdout
    assert short == (code == 3)
    ending = ", target missed at 2.00x" if code else ""
    assert result.stdout.splitlines()[-1] == f"{path}: the policy{ending}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speedup", "2", "--compute-steps", "9"], "not --speedup and --compute-steps"),
        (["--min-psnr", "40", "--speedup", "2"], "one kind of target, not --speedup and"),
        (["--threshold", "0", "--min-psnr", "40", "--method", "paper"], "and --threshold"),
        (["--min-psnr", "40", "--method", "paper"], "predicts no error"),
        (["--threshold", "0.1"], "--threshold needs --method paper"),
        (["--speedup", "2", "--heldout", "absent.txt"], "cannot read prompts"),
        (["--speedup", "2", "--profile", "{output}"], "must be different files"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    options: list[str], words: str, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "q.safetensors"
    given = [option.format(output=path) for option in options]
    assert words in refused("calibrate", "emoji-flux", *given, "-o", path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speedup", "2", "--speedup", "90"], "speedup must be between 1 and 15, got 90"),
        (["--compute-steps", "90"], "cannot compute 90 of 30 steps"),
    ],
)
def test_a_target_that_does_not_fit_the_steps_is_refused_before_any_work(
    options: list[str],
    words: str,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "profile_runs", lambda *_, **__: pytest.fail("it began"))
    path = tmp_path / "q.safetensors"
    assert words in refused("calibrate", "emoji-flux", *options, "-o", path)
    assert not path.exists()


def test_an_interrupt_leaves_the_old_policy(
    tmp_path: Path, policy_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupt)
    path = tmp_path / "q.safetensors"
    path.write_bytes(policy_file.read_bytes())
    result = run("calibrate", "emoji-flux", "--speedup", 2, "--force", "-o", path)
    assert result.exit_code == 130
    assert messages(result) == ["interrupted: nothing was written"]
    assert path.read_bytes() == policy_file.read_bytes()


def test_finished_work_stays_until_the_policy_is_written(
    tmp_path: Path, policy_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is too large, or a full disk, costs nothing but another try."""
    path = tmp_path / "q.safetensors"

    def made(*_: object, resume: Parts, **__: object) -> Policy:
        resume.save("0a", {"latents": torch.zeros(1)})
        with taking_up(resume, ALONE):  # as every calibration ends
            return Policy.load(policy_file)

    def failing(*_: object) -> None:
        raise PolicyError("cannot save: too large")

    monkeypatch.setattr(calibrate, "calibrate", made)
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "save", failing)
        result = run("calibrate", "emoji-flux", "--speedup", 2, "-o", path)
        assert (result.exit_code, messages(result)[-1]) == (2, "error: cannot save: too large")
    parts = tmp_path / "q.safetensors.parts"
    assert [part.name for part in parts.iterdir() if part.suffix] == ["0a.safetensors"]
    run("calibrate", "emoji-flux", "--speedup", 2, "-o", path)
    assert path.exists()
    assert not parts.exists()


@pytest.mark.usefixtures("given")
def test_a_measured_policy_is_overwritten_by_force_only(
    tmp_path: Path,
    calibrated_file: Path,
    run: Run,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, link = tmp_path / "q.safetensors", tmp_path / "link"
    path.write_bytes(calibrated_file.read_bytes())
    link.symlink_to(path)
    with monkeypatch.context() as patch:
        patch.setattr(zoo, "load_pipeline", lambda *_, **__: pytest.fail("a model was loaded"))
        line = refused("calibrate", "emoji-flux", "-o", link)
    lost = "3 runs of a profile, 1 measured plan"
    assert f"{str(link)!r} holds {lost}, which would be lost" in line
    assert "--force" in line
    assert path.read_bytes() == calibrated_file.read_bytes()
    assert run("calibrate", "emoji-flux", "--force", "-o", link).exit_code == 0
    assert Policy.load(path).default.measured is None


def test_push_uploads_what_was_written(
    hub: Hub, tmp_path: Path, run: Run, given: dict[str, Any]
) -> None:
    path = tmp_path / "q.safetensors"
    options = ["--push", "ada/policy", "--private"]
    result = run("calibrate", "emoji-flux", *options, "-o", path)
    assert result.exit_code == 0, result.output
    repo = hub.repos["ada/policy"]
    assert repo.private
    assert result.stdout.splitlines()[-1] == f"hub:ada/policy@{repo.refs['main']}: uploaded"
    files = repo.commits[repo.refs["main"]]
    assert files["policy.safetensors"] == path.read_bytes()
    assert b"base_model" not in files["README.md"]  # a bundled model is not on the hub
    assert TOKEN not in result.output + result.stderr
    assert TOKEN.encode() not in path.read_bytes()
    assert given


def test_a_push_that_fails_loses_nothing(
    hub: Hub, tmp_path: Path, run: Run, policy_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object, **__: object) -> Policy:
        hub.failing = 500  # from now on
        return Policy.load(policy_file)

    monkeypatch.setattr(calibrate, "calibrate", made)
    path = tmp_path / "q.safetensors"
    result = run("calibrate", "emoji-flux", "--push", "ada/policy", "-o", path)
    assert result.exit_code == 2
    last = messages(result)[-1]
    assert last.startswith("error: cannot push to ada/policy: ")
    assert f'the policy is in {path}: upload it with Policy.load("{path}").push_to_hub' in last
    assert Policy.load(path).plans


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--push", "policy"], "cannot push to policy: give a repository as user/repo"),
        (["--push", "bob/policy"], "the token is of ada, lovelace, and not of bob"),
        (["--push", "ada/model"], "a README.md that is not of a policy"),
        (["--private"], "--private is of a new repository: give its name with --push"),
    ],
)
def test_a_push_is_checked_before_any_work(
    options: list[str], words: str, hub: Hub, tmp_path: Path, refused: Refused
) -> None:
    hub.add("ada/model", {"README.md": b"# A model"})
    line = refused("calibrate", "emoji-flux", *options, "-o", tmp_path / "q.safetensors")
    assert words in line
    assert list(hub.repos) == ["ada/model"]


@pytest.mark.usefixtures("no_model")
def test_a_push_needs_a_token(
    hub: Hub, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    line = refused(
        "calibrate", "emoji-flux", "--push", "ada/policy", "-o", tmp_path / "q.safetensors"
    )
    assert line.endswith("there is no token: set HF_TOKEN, or run hf auth login")
    assert hub.requests == []
