"""``refit``: one more plan in the file, for the model and the runs that are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration import refit
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.models import zoo
from tests.cli.conftest import Refused, Run, T, messages


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the refit, which is not run: it replaces the first plan by a measured one.

    Whether that one is recommended is the caller's to change.
    """
    arguments: dict[str, Any] = {"psnr": 40.0}

    def made(pipe: object, policy: Policy, **values: Any) -> Policy:
        row = ValidationRow("policy", T // 2, arguments["psnr"], speedup=2.0, prompts=4)
        arguments.update(values)
        plan = replace(policy.default, validation=(row,) if values["heldout"] else ())
        return policy.with_plan(plan)

    monkeypatch.setattr(refit, "refit", made)
    monkeypatch.setattr(zoo, "load_pipeline", _nothing_to_load)
    return arguments


def _nothing_to_load(model: str, dtype: object) -> Any:
    class Pipe:
        def __call__(self, **arguments: object) -> None: ...

        def to(self, device: str) -> Pipe:
            return self

    return Pipe()


def with_provenance(source: Path, path: Path, **provenance: str) -> Path:
    """A copy of a policy with another provenance."""
    replace(Policy.load(source), provenance=provenance).save(path)
    return path


def test_a_plan_for_other_steps_and_sizes_joins_the_others(
    policy_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(policy_file.read_bytes())
    options = ["--compute-steps", 2, "--steps", 3, "--height", 32, "--width", 32]
    result = run("refit", path, *options)
    assert result.exit_code == 0, result.output
    before, after = Policy.load(policy_file), Policy.load(path)
    assert [plan.num_steps for plan in after.plans] == [T, 3]
    assert after.default.compute_steps == before.default.compute_steps
    assert after.default.sigmas.equal(before.default.sigmas)
    assert len(after.plans[1].compute_steps) == 2
    assert after.plans[1].measured_error is not None
    assert after.profile is not None
    assert before.profile is not None
    assert after.profile.runs == before.profile.runs
    commands = after.provenance["command"].split("\n")
    assert commands[:-1] == before.provenance["command"].split("\n")
    assert commands[-1].startswith(f"ertacache refit {path} --compute-steps 2")
    # The new plan alone is printed.
    assert result.stdout.count("method ") == 1
    assert "steps         3: 2 computed, 1 reused" in result.stdout
    assert "not measured on held-out prompts" in result.stdout
    assert result.stdout.splitlines()[-1] == f"{path}: the policy"
    assert list(tmp_path.iterdir()) == [path]


def test_the_default_is_the_speedup_and_the_steps_of_the_policy(
    policy_file: Path, tmp_path: Path, run: Run, given: dict[str, Any]
) -> None:
    path = tmp_path / "new.safetensors"
    before = policy_file.read_bytes()
    result = run("refit", policy_file, "--batch-size", 2, "-o", path)
    assert result.exit_code == 0, result.output
    assert (given["speedup"], given["compute_steps"], given["batch_size"]) == (None, None, 2)
    assert given["num_inference_steps"] == T  # the bundled model's own are 30
    assert policy_file.read_bytes() == before
    assert len(Policy.load(path).plans) == 1  # the new plan took the place of the old one
    assert result.stdout.count("method ") == 1


@pytest.mark.parametrize("options", [["--steps", "9"], ["--arg", "num_inference_steps=9"]])
def test_steps_that_are_given_win(
    options: list[str], policy_file: Path, tmp_path: Path, run: Run, given: dict[str, Any]
) -> None:
    run("refit", policy_file, *options, "--speedup", 3, "-o", tmp_path / "q")
    assert (given["num_inference_steps"], given["speedup"]) == (9, 3.0)


@pytest.mark.parametrize(("psnr", "code"), [(40.0, 0), (10.0, 3)])
def test_the_verdict_on_held_out_prompts(
    psnr: float,
    code: int,
    policy_file: Path,
    prompts_file: Path,
    tmp_path: Path,
    run: Run,
    given: dict[str, Any],
) -> None:
    path = tmp_path / "q.safetensors"
    given["psnr"] = psnr
    result = run("refit", policy_file, "--heldout", prompts_file, "-o", path)
    assert result.exit_code == code
    assert given["heldout"] == ["a red apple", "a small dog on a blue background"]
    assert "Measured on 4 held-out prompts" in result.stdout
    ending = ", not recommended at 2.00x" if code else ""
    assert result.stdout.splitlines()[-1] == f"{path}: the policy{ending}"
    assert Policy.load(path).default.measured is not None


@pytest.mark.parametrize("model", [{}, {"model": "/here/flux\n/there/flux"}])
def test_a_policy_that_names_no_model_asks_for_it(
    model: dict[str, str],
    policy_file: Path,
    tmp_path: Path,
    run: Run,
    refused: Refused,
    given: dict[str, Any],
) -> None:
    path = with_provenance(policy_file, tmp_path / "q.safetensors", **model)
    assert "does not say which model it is for: give it with --model" in refused("refit", path)
    result = run("refit", path, "--model", "emoji-flux")
    assert result.exit_code == 0, result.output
    assert Policy.load(path).provenance["model"] == "emoji-flux"  # next time it is known


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speedup", "2", "--compute-steps", "3"], "not --speedup and --compute-steps"),
        (["--heldout", "absent.txt"], "cannot read prompts from 'absent.txt'"),
        (["-o", "nowhere/q.safetensors"], "there is no folder 'nowhere'"),
        (["--min-psnr", "40"], "No such option"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_wrong_options(options: list[str], words: str, policy_file: Path, refused: Refused) -> None:
    before = policy_file.read_bytes()
    assert words in refused("refit", policy_file, *options)
    assert policy_file.read_bytes() == before


@pytest.mark.usefixtures("no_model")
def test_files_that_cannot_be_refitted(
    profile_file: Path, policy_file: Path, tmp_path: Path, refused: Refused
) -> None:
    line = refused("refit", profile_file)
    assert "is a profile and holds no plan: give --speedup or --compute-steps" in line
    bare = tmp_path / "bare.safetensors"
    replace(Policy.load(policy_file), profile=None).save(bare)
    assert "the policy has no profile" in refused("refit", bare)
    assert "the policy has no profile" in refused("refit", bare, "--model", "emoji-flux")
    assert "No such file" in refused("refit", tmp_path / "absent")


def test_an_interrupt_leaves_the_old_policy(
    policy_file: Path, run: Run, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(refit, "refit", interrupt)
    before = policy_file.read_bytes()
    result = run("refit", policy_file, "--speedup", 3)
    assert result.exit_code == 130
    assert messages(result) == ["interrupted: nothing was written"]
    assert policy_file.read_bytes() == before


@pytest.mark.usefixtures("given")
def test_a_measured_policy_is_overwritten_by_force_only(
    policy_file: Path,
    calibrated_file: Path,
    prompts_file: Path,
    tmp_path: Path,
    run: Run,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "q.safetensors"
    path.write_bytes(calibrated_file.read_bytes())
    arguments = ["refit", policy_file, "--heldout", prompts_file, "-o", path]
    with monkeypatch.context() as patch:
        patch.setattr(refit, "refit", lambda *_, **__: pytest.fail("it began"))
        line = refused(*arguments)
    assert f"{str(path)!r} holds 1 measured plan, which would be lost" in line
    assert "--force" in line
    assert path.read_bytes() == calibrated_file.read_bytes()
    assert run(*arguments, "--force").exit_code == 0
    result = run("refit", path, "--heldout", prompts_file)  # in place, measured again
    assert result.exit_code == 0, result.output
    assert run("refit", path).exit_code == 2  # one that was not measured does not replace it
