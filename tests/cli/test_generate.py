"""``generate``: images, videos, and the comparison of two runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ertacache.formats.policy import Policy
from ertacache.integration.solve import PlanSolver
from ertacache.models import zoo
from ertacache.models.zoo import MODELS, load_pipeline
from tests.cli.conftest import Refused, Run, T, Variant
from tests.integration import tiny


def pixels(path: Path) -> Any:
    return np.asarray(Image.open(path)).astype(int)


def test_without_a_policy_it_is_the_pipeline_itself(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "apple.png"
    result = run("generate", "emoji-flux", "a red apple", "--seeds", 3, "--steps", 2, "-o", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{path}: full run, ")
    call = MODELS["emoji-flux"].call_arguments | {"num_inference_steps": 2}
    pipe = load_pipeline("emoji-flux")
    image = pipe("a red apple", generator=torch.Generator().manual_seed(3), **call).images[0]
    assert np.abs(pixels(path) - np.asarray(image).astype(int)).max() <= 1
    assert list(tmp_path.iterdir()) == [path]


def test_compare_writes_both_and_their_difference(
    tmp_path: Path, policy_file: Path, prompts_file: Path, run: Run
) -> None:
    folder = tmp_path / "new" / "out"
    options = ["--prompts", prompts_file, "--policy", policy_file, "--compare"]
    result = run("generate", "emoji-flux", *options, "-o", folder)
    assert result.exit_code == 0, result.output
    stems = ["000-seed0-a-red-apple", "001-seed0-a-small-dog-on-a-blue-background"]
    names = [f"{stem}{kind}.png" for stem in stems for kind in ("", "-full", "-compare")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    lines = result.stdout.splitlines()
    assert f"{T // 2} steps computed, {T // 2} reused, " in lines[0]
    assert "full run" in lines[1]
    assert "PSNR" in lines[2]
    assert "x faster" in lines[2]
    assert lines[-1].startswith("all 2: PSNR")
    fast, full, row = (
        pixels(folder / f"{stems[0]}{kind}.png") for kind in ("", "-full", "-compare")
    )
    size = full.shape[1]
    assert row.shape[1] == 3 * size
    assert (row[:, :size] == full).all()
    assert (row[:, size : 2 * size] == fast).all()
    assert np.abs(row[:, 2 * size :] - (8 * np.abs(full - fast)).clip(0, 255)).max() <= 12


def test_other_files_of_the_folder_stay(tmp_path: Path, policy_file: Path, run: Run) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    options = ["--seeds", "1,5", "--policy", policy_file]
    result = run("generate", "emoji-flux", "../a\n cat?", *options, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000-seed1-a-cat.png", "000-seed5-a-cat.png", "notes.txt"]
    assert other.read_text() == "mine"


def test_a_tolerated_difference_is_a_warning_of_one_line(
    tmp_path: Path, policy_file: Path, run: Run
) -> None:
    path = tmp_path / "cat.png"
    options = ["--policy", policy_file, "--guidance", 2]
    result = run("generate", "emoji-flux", "a cat", *options, "-o", path)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: the policy was calibrated under other conditions: guidance_scale is 2.0, was 3.5"
    ]


def test_a_speedup_at_other_steps_and_sizes(tmp_path: Path, policy_file: Path, run: Run) -> None:
    options = ["--policy", policy_file, "--speedup", 3, "--steps", 8, "--height", 32]
    options += ["--width", 48, "--seeds", "0,1"]
    result = run("generate", "emoji-flux", "a cat", *options, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all(": 2 steps computed, 6 reused, " in line for line in lines)
    assert pixels(tmp_path / "000-seed0-a-cat.png").shape == (32, 48, 3)
    # Solved once for both, and each message once.
    solved, differs = result.stderr.splitlines()
    assert solved.startswith("solved a plan for this sigma schedule: 2 of 8 steps computed, ")
    assert "predicted PSNR to the full run" in solved
    assert differs.startswith("the run differs from the calibrated ones: latent_shape is (")


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        (["--speedup", "3"], f"2 steps computed, {T - 2} reused"),
        (["--compute-steps", "4"], f"4 steps computed, {T - 4} reused"),
        (["--speedup", "2", "--arg", "num_inference_steps=4"], "2 steps computed, 2 reused"),
    ],
)
def test_a_profile_serves_any_target(
    options: list[str], computed: str, tmp_path: Path, profile_file: Path, run: Run
) -> None:
    path = tmp_path / "cat.png"
    result = run("generate", "emoji-flux", "a cat", "--policy", profile_file, *options, "-o", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{path}: {computed}, ")


def test_a_psnr_takes_the_fewest_steps_that_are_predicted_to_reach_it(
    tmp_path: Path, profile_file: Path, run: Run
) -> None:
    solver = PlanSolver(Policy.load(profile_file))
    curve = solver.curve(solver.profile.schedule)
    assert curve[3] > curve[4]
    wanted = (solver.psnr(curve[3]) + solver.psnr(curve[4])) / 2
    options = ["--policy", profile_file, "--min-psnr", wanted]
    result = run("generate", "emoji-flux", "a cat", *options, "-o", tmp_path / "cat.png")
    assert result.exit_code == 0, result.output
    assert f": 4 steps computed, {T - 4} reused, " in result.stdout


def test_a_psnr_out_of_reach_computes_every_step_with_a_warning(
    tmp_path: Path, policy_file: Path, run: Run
) -> None:
    options = ["--policy", policy_file, "--min-psnr", 300]
    result = run("generate", "emoji-flux", "a cat", *options, "-o", tmp_path / "cat.png")
    assert result.exit_code == 0, result.output
    assert f": {T} steps computed, 0 reused, " in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: no plan is predicted to reach 300 dB in this run of")


def test_a_policy_serves_another_shift(
    tmp_path: Path, policy_file: Path, variant: Variant, run: Run
) -> None:
    options = ["--policy", policy_file, "--arg", "max_sequence_length=16", "--height", 64]
    out = tmp_path / "out"
    result = run("generate", variant(shift=1.0), "a cat", *options, "--width", 64, "-o", out)
    assert result.exit_code == 0, result.output
    assert f"{T // 2} steps computed, {T // 2} reused" in result.stdout
    assert result.stderr.startswith("solved a plan for this sigma schedule")


def test_a_policy_for_another_network_is_refused(
    tmp_path: Path, policy_file: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "load_pipeline", lambda model, dtype=None: tiny.flux())
    out = tmp_path / "out"
    line = refused("generate", "some/model", "a cat", "--policy", policy_file, "-o", out)
    assert "calibrated for another pipeline: denoiser_hash is " in line
    assert not out.exists()


def test_plans_without_a_profile_serve_their_own_runs_only(
    tmp_path: Path, policy_file: Path, refused: Refused
) -> None:
    bare, out = tmp_path / "bare.safetensors", tmp_path / "out"
    replace(Policy.load(policy_file), profile=None).save(bare)
    arguments = ["generate", "emoji-flux", "a cat", "--policy", bare, "-o", out]
    line = refused(*arguments, "--steps", T + 1)
    assert f"the run has {T + 1} steps, but the plan is for {T}" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give prompts"),
        (["a cat", "--prompts", "p.txt"], "give prompts"),
        (["  "], "a prompt is empty"),
        (["a cat", "--seeds", "1,x"], "--seeds takes numbers"),
        (["a cat", "--seeds", "-1"], "--seeds takes numbers"),
        (["a cat", "--compare"], "--compare needs a --policy"),
        (["a cat", "--speedup", "3"], "--speedup needs a --policy"),
        (["a cat", "--compute-steps", "3"], "--compute-steps needs a --policy"),
        (["a cat", "--min-psnr", "40"], "--min-psnr needs a --policy"),
        (["a cat", "--policy", "absent"], "cannot load 'absent': No such file"),
        (["a cat", "--policy", "{profile}"], "give --speedup, --compute-steps or --min-psnr"),
        (
            ["a cat", "--policy", "{profile}", "--speedup", "2", "--min-psnr", "40"],
            "give one kind of target, not --speedup and --min-psnr",
        ),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_wrong_options(
    options: list[str], words: str, tmp_path: Path, profile_file: Path, refused: Refused
) -> None:
    out = tmp_path / "out"
    given = [option.format(profile=profile_file) for option in options]
    assert words in refused("generate", "emoji-flux", *given, "-o", out)
    assert not out.exists()


def test_an_argument_of_several_values_is_refused(tmp_path: Path, refused: Refused) -> None:
    arguments = ["generate", "emoji-flux", "a cat", "--arg", "true_cfg_scale=[2,4]"]
    line = refused(*arguments, "-o", tmp_path / "cat.png")
    assert "generate takes one value of true_cfg_scale, not a list" in line


def test_a_video_pipeline_writes_videos(
    tmp_path: Path, run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setattr(zoo, "load_pipeline", lambda model, dtype=None: tiny.wan())
    options = ["--steps", 2, "--frames", 5, "--height", 16, "--width", 16]
    further = ["--arg", "max_sequence_length=8", "--fps", 4]
    arguments = ["generate", "some/model", "a red circle", *options, *further]
    result = run(*arguments, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    assert path.name == "000-seed0-a-red-circle.mp4"
    assert imageio.imread(path, plugin="FFMPEG").shape == (5, 16, 16, 3)
    assert ".mp4" in refused(*arguments, "-o", tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "pip install imageio imageio-ffmpeg" in refused(*arguments, "-o", tmp_path)
