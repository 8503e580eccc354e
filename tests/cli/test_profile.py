"""``profile``: what is written, continued, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.cli.console import Stages
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.models.zoo import load_prompts
from tests.cli.conftest import STEPS, Refused, Run, Variant, messages


def load(path: Path) -> tuple[Policy, Profile]:
    """A policy without plans, and its profile."""
    policy = Policy.load(path)
    assert policy.plans == ()
    assert policy.profile is not None
    return policy, policy.profile


def test_a_bundled_model_is_profiled_on_its_own_prompts(profile_file: Path) -> None:
    policy, profile = load(profile_file)
    assert [run.prompt for run in profile.runs] == load_prompts("emoji-flux", "calibration")[:3]
    assert [run.seed for run in profile.runs] == [0, 1, 2]
    assert profile.num_steps == int(STEPS)
    command = f"ertacache profile emoji-flux --limit 3 --steps {STEPS} -o {profile_file}"
    assert policy.provenance["command"] == command
    assert policy.provenance["model"] == "emoji-flux"
    assert f"num_inference_steps={STEPS}" in policy.provenance["call"]


def test_options_reach_the_pipeline(tmp_path: Path, prompts_file: Path, run: Run) -> None:
    path = tmp_path / "p.safetensors"
    options = ["--steps", 3, "--guidance", 2.5, "--height", 32, "--width", 32, "--seed", 7]
    more = ["--batch-size", 2, "--dtype", "bfloat16", "--device", "cpu"]
    further = ["--arg", "max_sequence_length=8"]
    arguments = ["profile", "emoji-flux", "--prompts", prompts_file, *options, *more, *further]
    result = run(*arguments, "-o", path)
    assert result.stdout == f"{path}: a profile of 2 runs of 3 steps\n"
    policy, profile = load(path)
    facts = policy.fingerprint
    assert [(run.prompt, run.seed) for run in profile.runs] == [
        ("a red apple", 7),
        ("a small dog on a blue background", 8),
    ]
    assert facts.guidance["guidance_scale"] == (2.5,)
    assert (facts.dtype, profile.num_steps) == ("bfloat16", 3)
    assert facts.latent_shape[0] == 16  # a quarter of 64 x 64


def test_an_interrupted_profile_keeps_its_runs_and_goes_on(
    tmp_path: Path, profile_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.safetensors"
    arguments = ["profile", "emoji-flux", "--limit", 3, "--steps", STEPS, "-o", path]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stages, "__call__", lambda self, name: interrupt)
        result = run(*arguments)
    assert result.exit_code == 130
    assert messages(result) == [
        f"interrupted: the runs so far are in {path}; the same command continues from there"
    ]
    assert load(path)[1].num_runs == 1
    assert run(*arguments).exit_code == 0
    again, straight = (Policy.load(file) for file in (path, profile_file))
    assert again.provenance["command"].endswith(str(path))  # once, for both runs of the command
    bare = [replace(each, provenance={}) for each in (again, straight)]
    bare[0].save(tmp_path / "again")
    bare[1].save(tmp_path / "straight")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "straight").read_bytes()


def test_a_stochastic_scheduler_is_refused(
    tmp_path: Path, variant: Variant, prompts_file: Path, refused: Refused
) -> None:
    path = tmp_path / "p.safetensors"
    folder = variant(stochastic_sampling=True)
    line = refused("profile", folder, "--prompts", prompts_file, "--steps", 2, "-o", path)
    assert "FlowMatchEulerDiscreteScheduler with stochastic_sampling=False" in line
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompts", "absent.txt"], "cannot read prompts from 'absent.txt': No such file"),
        (["--prompts", "."], "cannot read prompts from '.': Is a directory"),
        (["--arg", "prompt=a cat"], "--arg cannot set 'prompt'"),
        (["--arg", "nothing"], "--arg takes NAME=VALUE, got 'nothing'"),
        (["--frames", "5"], "FluxPipeline takes no argument 'num_frames'"),
        (["--arg", "colour=red"], "FluxPipeline takes no argument 'colour'"),
        (["--device", "toaster"], "cannot run on 'toaster'"),
        (["--arg", "max_sequence_length=long"], "failed with --arg max_sequence_length=long"),
    ],
)
def test_wrong_options(options: list[str], words: str, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "p.safetensors"
    assert words in refused("profile", "emoji-flux", "--limit", 1, *options, "-o", path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "9"], f"num_inference_steps is 9, was {STEPS}"),
        (["--steps", STEPS, "--guidance", "2"], "guidance_scale is 2.0, was 3.5"),
        (["--steps", STEPS, "--dtype", "bfloat16"], "dtype is 'bfloat16', was 'float32'"),
    ],
)
def test_a_profile_of_another_run_is_not_continued(
    options: list[str], words: str, profile_file: Path, refused: Refused
) -> None:
    before = profile_file.read_bytes()
    line = refused("profile", "emoji-flux", "--limit", 3, *options, "-o", profile_file)
    assert f"{str(profile_file)!r}: the profile there cannot be continued: {words}" in line
    assert profile_file.read_bytes() == before
