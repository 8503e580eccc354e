"""A whole benchmark on a tiny pipeline: rows, resumption, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from ertacache.baselines import BASELINES
from ertacache.bench import contestants
from ertacache.bench.bench import Bench
from ertacache.bench.contestants import EXTRAPOLATIONS, POLICIES, extrapolation_contestants
from ertacache.bench.journal import Journal
from ertacache.bench.methods import METHODS as ALL
from ertacache.bench.results import read_results
from ertacache.bench.workload import Workload
from ertacache.calibration.session import Session, number_runs
from ertacache.formats.policy import Policy
from ertacache.metrics import distribution
from tests.baselines.cases import count
from tests.formats.faults import holding_lock
from tests.integration.tiny import CASES

METHODS = ("trajectory", "paper", "our schedule, order 1", "fewer steps", "uniform", "T-GATE")
STEPS = 8


@pytest.fixture(scope="module")
def work() -> Workload:
    case = CASES["flux"]
    call = {k: v for k, v in case.arguments.items() if k not in ("prompt", "output_type")}
    pipe = case.build()
    pipe.set_progress_bar_config(disable=True)
    calibration = number_runs(["a red circle", "a blue square"])
    heldout = number_runs(["a blue circle", "a red square", "a black circle"], 100)
    session = Session(pipe, call | {"num_inference_steps": STEPS}, batch_size=2)
    return Workload("tiny", session, calibration, heldout)


@pytest.fixture(scope="module")
def results(work: Workload, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    Bench(work, path, (2.0,), METHODS, "ertacache bench tiny").run()
    return path


def test_every_method_has_a_row_and_the_full_run_is_one_of_them(results: Path) -> None:
    written = json.loads(results.read_text())
    rows = {row["method"]: row for row in written["rows"]}
    assert set(rows) == {"full", *METHODS}
    assert rows["full"]["psnr_db"] == 100.0
    assert rows["full"]["flops_ratio"] == 1.0
    assert rows["full"]["cached_bytes"] == 0
    for method in ("trajectory", "our schedule, order 1", "fewer steps", "uniform"):
        assert rows[method]["prompts"] == 3
        assert rows[method]["psnr_p10"] < rows[method]["psnr_db"]
        assert rows[method]["flops_ratio"] == 0.5
        assert rows[method]["compute_steps"] == STEPS // 2
        assert rows[method]["psnr_db"] < 100.0
    assert rows["trajectory"]["cached_bytes"] > rows["fewer steps"]["cached_bytes"] == 0
    assert "cross-attention" in rows["T-GATE"]["why_not"]
    assert rows["T-GATE"]["psnr_db"] is None
    assert written["command"] == "ertacache bench tiny"


def test_extrapolation_on_our_schedule_ends_on_a_computed_step(
    work: Workload, results: Path
) -> None:
    path = results.with_suffix(".policies") / "trajectory-2x.safetensors"
    journal, ours = Journal(None, {}), Policy.load(path)
    journal.add_policy("trajectory", 2.0, ours)
    (found,) = extrapolation_contestants(work, (2.0,), ("our schedule, order 2",), journal)
    steps, computed = [], [*ours.default.compute_steps[:-1], STEPS - 1]

    def note(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.extend([step] * (len(calls) > len(steps)))
        return tensors

    with found.attach(), count(work.pipe.transformer.proj_out) as calls:
        call = {"output_type": "latent", "callback_on_step_end": note}
        work.session.run(work.calibration[:1], **call)
    assert steps == computed


def test_one_setting_for_two_budgets_is_run_once(work: Workload, tmp_path: Path) -> None:
    bench = Bench(work, tmp_path / "bench.json", (1.9, 2.0), ("uniform",))
    with count(work.pipe.vae.decoder) as decoded:
        rows = bench.run()
    assert [(row.budget, row.compute_steps) for row in rows[1:]] == [(1.9, 4), (2.0, 4)]
    assert len(decoded) == 2 * len(work.batches)  # uniform and the full run
    assert rows[1].psnr == rows[2].psnr


def test_policies_are_kept_without_the_profile_which_is_kept_once(results: Path) -> None:
    found = {path.name: Policy.load(path) for path in results.with_suffix(".policies").iterdir()}
    profile = found.pop("profile-1x.safetensors")
    assert set(found) == {"trajectory-2x.safetensors", "paper-2x.safetensors"}
    assert profile.profile is not None
    assert profile.fits
    for policy in found.values():
        assert policy.profile is None
        assert len(policy.plans) == 1
    ours = found["trajectory-2x.safetensors"].default
    assert (ours.method, len(ours.compute_steps)) == ("trajectory", STEPS // 2)
    assert ours.measured_error is not None  # refitted, or found to be better as it was


def test_a_second_run_measures_nothing_again(
    work: Workload, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(results.read_text())
    ran: list[Any] = []
    original = type(work.pipe).__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(kwargs["output_type"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(work.pipe), "__call__", call)
    bench = Bench(work, results, (2.0,), METHODS, "ertacache bench tiny")
    bench.run()
    assert ran == []
    assert json.loads(results.read_text()) == before
    lines = bench.journal_path.read_text().splitlines()
    bench.journal_path.write_text("\n".join(lines[:-1]) + "\n")
    bench.run()
    assert ran == ["pt", "pt"]  # the missing one, and the full run it is compared with
    ran.clear()
    (cost,) = [n for n, line in enumerate(lines) if '"cost", "method": "uniform"' in line]
    bench.journal_path.write_text("\n".join(lines[:cost]) + "\n")
    bench.run()
    assert ran[0] == "latent"  # the cost that was lost
    assert "latent" not in ran[1:]
    for new, old in zip(json.loads(results.read_text())["rows"], before["rows"], strict=True):
        # Sigma schedules of the run before are alive too: they differ by a few bytes.
        assert new.pop("cached_bytes") == pytest.approx(old.pop("cached_bytes"), abs=512)
        assert without_times(new) == without_times(old)


def test_only_the_same_benchmark_continues_another(work: Workload, results: Path) -> None:
    """Whatever its command line; other prompts of the same seeds, or another call, do not."""
    spelled = Bench(work, results, (2.0,), METHODS, "ertacache bench tiny -q")
    assert len(spelled.run()) == 1 + len(METHODS)
    prompts = number_runs(["a circle", "a red square", "a black circle"], 100)
    other = Session(work.pipe, work.session.call | {"guidance_scale": 9.0}, batch_size=2)
    for changed in (replace(work, heldout=prompts), replace(work, session=other)):
        with pytest.raises(ValueError, match="belongs to a benchmark with other settings"):
            Bench(changed, results, (2.0,), METHODS, "ertacache bench tiny").run()


def test_samples_that_an_interruption_lost_are_made_again(work: Workload, tmp_path: Path) -> None:
    bench = Bench(work, tmp_path / "bench.json", (2.0,), ("fewer steps", "uniform"))
    bench.run()
    made, lines = load_file(bench.samples_path), bench.journal_path.read_bytes()
    kept = {key: value for key, value in made.items() if "uniform" not in key}
    save_file(kept, bench.samples_path, metadata={"prompts": "[]"})
    bench.run()
    assert load_file(bench.samples_path).keys() == made.keys()
    assert bench.journal_path.read_bytes() == lines  # nothing is measured twice


def test_a_result_with_nan_is_written_and_read(
    work: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = work.session.generate

    def spoiled(runs: Any, **changes: Any) -> Any:
        made = generate(runs, **changes)
        if len(work.pipe.scheduler.timesteps) < STEPS:  # fewer steps
            made.results[0] = float("nan")
        return made

    monkeypatch.setattr(work.session, "generate", spoiled)
    Bench(work, tmp_path / "bench.json", (2.0,), ("fewer steps",)).run()
    _, rows = read_results(tmp_path / "bench.json")
    (fewer,) = (row for row in rows if row.method == "fewer steps")
    assert fewer.psnr is not None
    assert fewer.psnr.low == 0.0


def test_an_interruption_after_the_trials_does_not_repeat_them(
    work: Workload, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kept = results.with_suffix(".policies"), tmp_path / "bench.policies"
    kept.mkdir()
    shutil.copy(made / "profile-1x.safetensors", kept)
    first = Bench(work, results, (2.0,), METHODS, "ertacache bench tiny")
    head, profile, trials, *_ = first.journal_path.read_text().splitlines()
    path = tmp_path / "bench.journal.jsonl"
    path.write_text("\n".join((head, profile, trials)) + "\n")
    monkeypatch.setattr(contestants, "profile_runs", None)
    monkeypatch.setattr(contestants, "measure_fits", None)
    names = ("trajectory", "paper")
    again = contestants.policy_contestants(work, (2.0,), names, Journal(path, json.loads(head)))
    assert [each.method for each in again] == list(names)
    for name in names:
        old, new = (folder / f"{name}-2x.safetensors" for folder in (made, kept))
        assert old.read_bytes() == new.read_bytes()


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(("seconds", "speedup"))}


def test_bad_arguments_are_refused_before_any_work(work: Workload, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such method: Magic; there are: trajectory"):
        Bench(work, tmp_path / "x.json", methods=("Magic",))
    for budget in (1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a finite number greater than 1"):
            Bench(work, tmp_path / "x.json", budgets=(2.0, budget))
    with pytest.raises(ValueError, match="budgets of 8 steps are at most 4, so that"):
        Bench(work, tmp_path / "x.json", budgets=(2.0, 5.0))
    with pytest.raises(ValueError, match="two images"):
        Bench(work, tmp_path / "x.json", (2.0,), reference=tmp_path)
    for level in (0, 255):
        Image.new("RGB", (4, 4), (level, level, level)).save(tmp_path / f"{level}.png")
    with pytest.raises(ValueError, match="FID needs at least two held-out prompts"):
        Bench(
            replace(work, heldout=work.heldout[:1]), tmp_path / "x.json", (2.0,), reference=tmp_path
        )
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="'our schedule, order 1' has the compute schedule of"):
        Bench(work, tmp_path / "x.json", (2.0,), ("our schedule, order 1", "uniform"))
    assert not list(tmp_path.iterdir())


def test_fid_of_every_method_that_applies(
    work: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "inception_features", lambda x: 1e3 * x.mean((2, 3)))
    for name, level in (("a.png", 0), ("b.png", 255)):
        Image.new("RGB", (4, 4), (level, level, level)).save(tmp_path / name)
    methods = ("fewer steps", "T-GATE")
    rows = Bench(work, tmp_path / "x.json", (2.0,), methods, reference=tmp_path).run()
    distances = {row.method: row.fid for row in rows}
    assert distances["full"] > 0
    assert distances["fewer steps"] > 0
    assert distances["full"] != distances["fewer steps"]
    assert distances["T-GATE"] is None


def test_every_policy_and_every_baseline_is_a_method() -> None:
    assert list(ALL) == [*POLICIES, *EXTRAPOLATIONS, *BASELINES]
    assert "fewer steps" in ALL


def test_two_processes_write_one_journal(work: Workload, tmp_path: Path) -> None:
    bench = Bench(work, tmp_path / "bench.json", (2.0,), ("fewer steps",))
    with holding_lock(bench.journal_path) as other:
        with pytest.raises(ValueError, match=f"being written by process {other.pid}"):
            bench.run()
        assert [path.name for path in tmp_path.iterdir()] == [".bench.journal.jsonl.lock"]
