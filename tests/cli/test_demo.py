"""``demo``: the table, the images and the policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from ertacache.cli import demo
from ertacache.formats.policy import Policy
from tests.cli.conftest import Refused, Run


def test_the_demo_in_small(run: Run, tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    small = ["--prompts", 2, "--heldout", 2, "--steps", 6]
    result = run("demo", *small, "-o", tmp_path / "out", "--json", values)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    computed = {tuple(words[:2]): words[2] for words in lines if len(words) > 4}
    assert computed[("ertacache", "2x")] == "3"
    assert computed[("ertacache", "3x")] == "2"
    assert computed[("fewer", "steps")] in ("3", "2")
    found = json.loads(values.read_text())
    steps = {row["name"]: row["computed_steps"] for row in found["results"]}
    assert (steps["ertacache 2x"], steps["ertacache 3x"]) == (3, 2)
    assert Path(found["policy"]).is_file()
    image = Image.open(found["images"])
    assert image.height > 5 * 128  # full, 2x, difference, 3x, difference
    policy = Policy.load(tmp_path / "out" / "emoji-flux.safetensors")
    assert [len(plan.compute_steps) for plan in policy.plans] == [3, 2]
    assert policy.profile is not None
    assert policy.frontier


def test_too_few_steps_are_refused_before_any_work(tmp_path: Path, refused: Refused) -> None:
    line = refused("demo", "--steps", 5, "-o", tmp_path / "out")
    assert "speedup must be between 1 and 2.5, got 3" in line
    assert list(tmp_path.iterdir()) == []


def test_the_demo_runs_twice_and_loses_nothing(
    run: Run, calibrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, path = Policy.load(calibrated_file), tmp_path / "emoji-flux.safetensors"
    monkeypatch.setattr(demo, "_calibrate", lambda *_: (policy, {"2x": policy.default}))
    monkeypatch.setattr(demo, "_measure", lambda *_: ([], []))
    for name in ("_results", "_print_results", "_draw"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    assert policy.profile is not None
    prompts = [each.prompt for each in policy.profile.runs]
    monkeypatch.setattr("ertacache.models.load_prompts", lambda *_: prompts)
    same = ("demo", "--prompts", len(prompts), "--steps", policy.profile.num_steps)
    assert run(*same, "-o", tmp_path).exit_code == 0
    assert run(*same, "-o", tmp_path).exit_code == 0
    monkeypatch.setattr(demo, "_calibrate", lambda *_: pytest.fail("work before the refusal"))
    assert "would be lost" in run("demo", "-o", tmp_path).stderr
    monkeypatch.setattr(demo, "_calibrate", lambda *_: (policy, {"2x": policy.default}))
    others = tuple(replace(run, seed=run.seed + 100) for run in policy.profile.runs)
    replace(policy, profile=replace(policy.profile, runs=others)).save(path)
    before = path.read_bytes()
    result = run("demo", "-o", tmp_path)
    assert result.exit_code == 2
    assert "holds 3 runs of a profile, 1 measured plan, which would be lost" in result.stderr
    assert path.read_bytes() == before
    assert run("demo", "--force", "-o", tmp_path).exit_code == 0
    assert path.read_bytes() != before
    assert list(tmp_path.iterdir()) == [path]


def test_the_policy_of_the_demo_is_kept_if_its_images_cannot_be_written(
    run: Run, calibrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, path = Policy.load(calibrated_file), tmp_path / "emoji-flux.safetensors"
    monkeypatch.setattr(demo, "_calibrate", lambda *_: (policy, {"2x": policy.default}))
    monkeypatch.setattr(demo, "_measure", lambda *_: ([], []))
    for name in ("_results", "_print_results"):
        monkeypatch.setattr(demo, name, lambda *_: None)

    def draw(*_: object) -> None:
        raise OSError(28, "No space left on device", "comparison.png")

    monkeypatch.setattr(demo, "_draw", draw)
    assert run("demo", "-o", tmp_path).exit_code == 2
    assert len(Policy.load(path).plans) == 1
