"""``generate``: images, videos, and the comparison of two runs."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ertacache.calibration.session import Session
from ertacache.formats.policy import Policy
from ertacache.integration import sizes
from ertacache.integration.solve import PlanSolver
from ertacache.models import zoo
from ertacache.models.zoo import MODELS, load_pipeline
from tests.cli.conftest import Refused, Run, T, Variant, messages
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
    size, column = full.shape[1], row.shape[1] // 3
    labels, shown = row[:-size], row[-size:]
    assert (shown[:, :size] == full).all()
    assert (shown[:, column : column + size] == fast).all()
    amplified = shown[:, 2 * column :][:, :size]
    assert np.abs(amplified - (8 * np.abs(full - fast)).clip(0, 255)).max() <= 12
    for place in range(3):  # each has a label in black on white
        above = labels[:, place * column : (place + 1) * column]
        assert (above.min(), above.max()) == (0, 255)


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
    assert messages(result) == [
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
    solved, differs = messages(result)
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
    (line,) = messages(result)
    assert line.startswith("warning: no plan is predicted to reach 300 dB in this run of")


def test_a_policy_serves_another_shift(
    tmp_path: Path, policy_file: Path, variant: Variant, run: Run
) -> None:
    options = ["--policy", policy_file, "--arg", "max_sequence_length=16", "--height", 64]
    out = tmp_path / "out"
    result = run("generate", variant(shift=1.0), "a cat", *options, "--width", 64, "-o", out)
    assert result.exit_code == 0, result.output
    assert f"{T // 2} steps computed, {T // 2} reused" in result.stdout
    assert messages(result)[0].startswith("solved a plan for this sigma schedule")


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


def test_a_size_below_one_latent_is_one_line(tmp_path: Path, refused: Refused) -> None:
    arguments = ["generate", "emoji-flux", "a cat", "--height", 4, "--width", 4]
    line = refused(*arguments, "-o", tmp_path / "cat.png")
    assert line == "error: height 4 is too small: FluxPipeline works on a grid of 8 x 8 pixels"


def test_a_height_of_ten_million_is_refused_with_both_numbers(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "available_memory", lambda device: 20_000_000_000)
    arguments = ["generate", "emoji-flux", "a cat", "--height", 10_000_000]
    line = refused(*arguments, "-o", tmp_path / "cat.png")
    assert "10000000 x 64 pixels need at least 89.6 GB of memory, and 20.0 GB are" in line


def test_a_height_of_65_gives_64_with_a_warning(tmp_path: Path, run: Run) -> None:
    options = ["--height", 65, "--steps", 2, "--seeds", "0,1", "-o", tmp_path]
    result = run("generate", "emoji-flux", "a cat", *options)
    assert result.exit_code == 0, result.output
    assert messages(result) == ["warning: the pipeline made height 64 instead of 65"]


def test_a_size_that_the_pipeline_fails_on_is_one_line(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *arguments: Any, **further: Any) -> None:
        raise RuntimeError("Kernel size can't be greater than actual input size")

    monkeypatch.setattr(Session, "generate", fail)
    options = ["--height", 24, "--frames", 5, "--arg", "max_sequence_length=8"]
    monkeypatch.setattr(zoo, "load_pipeline", lambda model, dtype=None: tiny.wan())
    line = refused("generate", "some/model", "a cat", *options, "-o", tmp_path)
    given = "--height 24 --frames 5 --arg max_sequence_length=8"
    assert f"the pipeline failed with {given}: Kernel size can't be" in line


def test_videos_are_compared_in_files_with_and_without_loss(
    tmp_path: Path, run: Run, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setattr(zoo, "load_pipeline", lambda model, dtype=None: tiny.wan())
    call = ["--steps", 4, "--frames", 5, "--height", 16, "--width", 16]
    call += ["--arg", "max_sequence_length=8"]
    policy = tmp_path / "profile.safetensors"
    result = run("profile", "some/model", "--prompts", prompts_file, *call, "-o", policy)
    assert result.exit_code == 0, result.output
    for name, options in (("lossy.mp4", []), ("lossless.mp4", ["--lossless"])):
        path, lossy = tmp_path / name, not options
        target = ["--policy", policy, "--speedup", 2, "--compare", *options]
        result = run("generate", "some/model", "a cat", *call, *target, "-o", path)
        assert result.exit_code == 0, result.output
        assert ("the MP4 files are compressed" in result.stdout) == lossy
        printed = float(re.findall(r"PSNR ([\d.]+) dB", result.stdout)[0])
        full = path.with_name(f"{path.stem}-full.mp4")
        result = run("metrics", path, full, "--metric", "psnr")
        assert ("2 of 2 files are compressed with loss (h264)" in result.stdout) == lossy
        found = float(re.findall(r"([\d.]+) dB", result.stdout)[0])
        assert lossy or found == pytest.approx(printed, abs=0.3)  # but for rounding to 8 bits


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
