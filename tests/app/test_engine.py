"""The jobs of the app, on a tiny pipeline that stands in for a bundled one."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.app import engine as module
from ertacache.app.engine import Engine
from ertacache.app.outcomes import Cancelled
from ertacache.app.requests import Limits, Request
from ertacache.formats.policy import Policy
from ertacache.integration.identity import find_denoisers
from tests.integration.tiny import CASES, STEPS

MODEL = "emoji-flux"
SIZE = CASES["flux"].arguments
PROMPTS = "a red circle\na blue square\na red square\na blue circle"
REQUEST = Request("a red circle", 0, STEPS, SIZE["height"], SIZE["width"], speedup=2.0)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASES["flux"].build()


@pytest.fixture
def engine(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(module, "load_pipeline", lambda source: pipe)
    monkeypatch.setattr(module, "SECONDS_APART", math.inf)  # one report of every run
    return Engine()


@pytest.fixture(scope="module")
def policy_file(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the app's own calibration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_pipeline", lambda source: pipe)
        stages: list[str] = []
        report = lambda stage, done, total: stages.append(stage)  # noqa: E731
        made = Engine().calibrate(MODEL, PROMPTS, REQUEST, report)
    assert list(dict.fromkeys(stages))[:2] == ["load", "profile"]
    path = tmp_path_factory.mktemp("app") / "policy.safetensors"
    made.policy.save(path)
    return path


@pytest.fixture
def ready(engine: Engine, policy_file: Path) -> Engine:
    engine.open_policy(policy_file, model=MODEL)
    return engine


def test_both_runs_and_what_was_measured(ready: Engine) -> None:
    stages: list[str] = []
    made = ready.generate(MODEL, REQUEST, lambda stage, done, total: stages.append(stage))
    assert made.full.shape == made.accelerated.shape
    assert len(made.compute_steps) == STEPS // 2
    assert made.num_steps == STEPS
    mse = (made.full.double() - made.accelerated.double()).square().mean()
    assert made.scores["PSNR"] == pytest.approx(float(-10 * torch.log10(mse)))
    assert set(made.scores) == {"PSNR", "SSIM", "LPIPS"}
    assert list(dict.fromkeys(stages)) == ["load", "full run", "accelerated run"]


def test_a_speed_up_of_1_is_the_full_run(ready: Engine) -> None:
    made = ready.generate(MODEL, replace(REQUEST, speedup=1.0))
    assert torch.equal(made.full, made.accelerated)
    assert made.compute_steps == tuple(range(STEPS))


@pytest.mark.parametrize("steps", [STEPS, STEPS + 4])
def test_predictions_evaluate_no_network_and_name_the_steps_of_the_run(
    ready: Engine, pipe: Any, steps: int
) -> None:
    asked, calls = replace(REQUEST, steps=steps), []
    (network,) = find_denoisers(pipe).values()
    forward = network.forward
    network.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    try:
        found = [ready.predict(MODEL, replace(asked, speedup=s)) for s in (1.0, 1.5, 2.0, 3.0)]
        assert not calls
    finally:
        del network.forward
    known = [None if each.measured is None else each.measured.computed_steps for each in found]
    assert known == ([None, None, 4, 2] if steps == STEPS else [None] * 4)
    psnrs = [each.psnr for each in found]
    assert None not in psnrs
    assert psnrs == sorted(psnrs, reverse=True)  # type: ignore[type-var]
    assert found[0].computed == steps
    run = ready.generate(MODEL, replace(asked, speedup=2.0))
    assert len(run.compute_steps) == found[2].computed


def test_a_prediction_does_not_wait_for_a_job(ready: Engine) -> None:
    with ready._running():
        found = ready.predict(MODEL, REQUEST)
    assert (found.computed, found.psnr) == (STEPS // 2, None)
    assert "a job is running" in found.why
    assert ready.predict(MODEL, REQUEST).psnr is not None


def test_without_a_policy(engine: Engine) -> None:
    assert "calibrate it first, or open" in engine.predict(MODEL, REQUEST).why
    with pytest.raises(ValueError, match="no policy for emoji-flux yet: calibrate it"):
        engine.generate(MODEL, REQUEST)


def test_a_cancelled_calibration_leaves_everything_as_it_was(ready: Engine, pipe: Any) -> None:
    before, stages = ready.policy(MODEL), []

    def report(stage: str, done: int, total: int) -> None:
        stages.append((stage, done))
        if done == 1:
            ready.cancel()

    with pytest.raises(Cancelled, match="nothing was changed"):
        ready.calibrate(MODEL, PROMPTS, REQUEST, report)
    assert stages[-1] == ("profile", 1)
    assert ready.policy(MODEL) is before
    assert all(not each._forward_pre_hooks for each in find_denoisers(pipe).values())
    assert ready.generate(MODEL, REQUEST).num_steps == STEPS  # the next job is not cancelled


def test_only_the_owner_cancels(ready: Engine) -> None:
    """And who has no job running cancels nothing, now or later."""
    assert not ready.cancel("ada")
    refused = []

    def report(stage: str, done: int, total: int) -> None:
        if stage == "full run" and not refused:
            refused.append(ready.cancel("bob"))

    assert ready.generate(MODEL, REQUEST, report, owner="ada").num_steps == STEPS
    assert refused == [False]

    def stop(stage: str, done: int, total: int) -> None:
        ready.cancel("ada")

    with pytest.raises(Cancelled):
        ready.generate(MODEL, REQUEST, stop, owner="ada")


def test_policies_stay_in_the_working_folder(
    engine: Engine, tmp_path: Path, policy_file: Path
) -> None:
    """Those of before are kept, and the next session uses the newest that fits."""
    first = Engine(tmp_path)
    assert [
        first.calibrate(MODEL, PROMPTS, REQUEST, quick=True).file,
        first.calibrate(MODEL, PROMPTS, REQUEST, quick=True).file,
    ] == ["emoji-flux.safetensors", "emoji-flux-2.safetensors"]
    other = replace(Policy.load(policy_file), provenance={"model": "owner/another"})
    other.save(tmp_path / "another.safetensors")
    lora = {"model": MODEL, "lora": "style.safetensors"}
    replace(Policy.load(policy_file), provenance=lora).save(tmp_path / "lora.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no policy")
    (tmp_path / "link.safetensors").symlink_to(policy_file)
    for name, age in (
        ("emoji-flux", 2),
        ("emoji-flux-2", 3),
        ("another", 1),
        ("broken", 0),
        ("lora", 0),
    ):
        os.utime(tmp_path / f"{name}.safetensors", (1000 - age, 1000 - age))
    found = Engine(tmp_path)
    assert found.predict(MODEL, REQUEST).ready
    used = found.policy(MODEL)
    assert used is not None
    assert used._to_bytes() == (tmp_path / "emoji-flux.safetensors").read_bytes()


def test_a_quick_calibration_measures_nothing_and_runs(engine: Engine) -> None:
    made = engine.calibrate(MODEL, "a red circle\na blue square", REQUEST, quick=True)
    assert made.file is None
    assert made.policy.unit_psnr is None
    assert all(plan.measured is None for plan in made.policy.plans)
    assert engine.predict(MODEL, REQUEST).psnr is not None
    assert len(engine.generate(MODEL, REQUEST).compute_steps) == STEPS // 2


def test_a_folder_has_the_defaults_of_its_pipeline(tmp_path: Path) -> None:
    """Within the limits; its prompts are general ones."""
    for name, kind in (("clip", "WanPipeline"), ("odd", "NoSuchPipeline")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(f'{{"_class_name": "{kind}"}}')
    engine = Engine(tmp_path, limits=Limits(side=640))
    clip, odd = engine.default_request("clip"), engine.default_request("odd")
    assert (clip.steps, clip.height, clip.width, clip.frames) == (50, 480, 640, 81)
    assert (odd.steps, odd.height, odd.width, odd.frames) == (30, 512, 512, None)
    assert len(engine.calibration_prompts("clip", 4).split("\n")) == 4
    with pytest.raises(ValueError, match="cannot load the pipeline 'odd'"):
        engine.calibrate("odd", PROMPTS, REQUEST)


def test_a_size_that_does_not_fit_is_refused_before_it_runs(
    ready: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ertacache.integration.sizes.available_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="are available: give a smaller size"):
        ready.generate(MODEL, REQUEST)


def test_one_job_at_a_time(ready: Engine) -> None:
    stages: list[str] = []

    def job() -> None:
        ready.generate(MODEL, REQUEST, lambda stage, done, total: stages.append(stage))

    threads = [threading.Thread(target=job) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = [k for k, stage in enumerate(stages) if stage == "load"]
    assert len(order) == 3
    assert stages == stages[: len(stages) // 3] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": "a" * 3000}, "3000 characters, more than 2000"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": None}, "got nothing"),
        ({"steps": 1000}, "steps must be a whole number from 2 to 200, got 1000"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"height": 1 << 20}, "height must be a whole number from 8 to 1024"),
        ({"width": float("nan")}, "width must be a whole number"),
        ({"speedup": 0.5}, "speed-up must be a number of at least 1"),
        ({"speedup": float("inf")}, "speed-up must be a number of at least 1"),
    ],
)
def test_requests_out_of_range(ready: Engine, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ready.generate(MODEL, replace(REQUEST, **change))
    with pytest.raises(ValueError, match=words):
        ready.predict(MODEL, replace(REQUEST, **change))


@pytest.mark.parametrize("model", ["/etc", "../wan", "owner/name", ""])
def test_only_listed_models_are_loaded(engine: Engine, model: str) -> None:
    with pytest.raises(ValueError, match="is none of: emoji-flux"):
        engine.predict(model, REQUEST)


def test_files_that_are_no_policy(ready: Engine, tmp_path: Path, policy_file: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        ready.open_policy(text)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(policy_file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="cannot load"):
        ready.open_policy(cut, model=MODEL)
    small = Engine(limits=Limits(upload=1 << 10))
    with pytest.raises(ValueError, match="more than the 0 MB"):
        small.open_policy(policy_file)
    assert ready.generate(MODEL, REQUEST).num_steps == STEPS


def test_a_policy_of_another_network(engine: Engine, policy_file: Path) -> None:
    policy = Policy.load(policy_file)
    other = replace(policy.fingerprint, denoiser="WanTransformer3DModel")
    path = policy_file.with_name("other.safetensors")
    replace(policy, fingerprint=other).save(path)
    with pytest.raises(ValueError, match="WanTransformer3DModel"):
        engine.open_policy(path, model=MODEL)
    assert engine.policy(MODEL) is None
    assert engine.open_policy(path).policy.plans  # to look at
