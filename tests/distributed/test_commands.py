"""Commands in several processes: the main one writes and prints, and an error ends all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ertacache.formats.policy import Policy
from tests.distributed.launch import COMPUTED, PROMPTS, STEPS, launch

PROFILE = ["profile", "emoji-flux", "--limit", "3", "--steps", "4", "-o", "profile.safetensors"]
GENERATE = ["generate", "emoji-flux", "--steps", "2", "--seeds", "0,1,2", "-o", "out", "an apple"]
BENCH = (
    *("bench", "emoji-flux", "--methods", "fewer-steps", "--budgets", "2", "--steps", "4"),
    *("--calibration", "2", "--limit", "3", "--batch-size", "1", "-o", "bench.json"),
)
OPTIONS = (
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--main_process_port", "0"),
)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("launched")
    task = {"task": "command", "count": 2}
    codes = launch(
        task | {"count": 1, "folder": root / "1", "arguments": PROFILE},
        task | {"folder": root / "2", "arguments": PROFILE},
        task | {"folder": root / "failed", "arguments": PROFILE, "fail": 1},
        task | {"folder": root / "refused", "arguments": ["profile", "no-such-model", "-o", "x"]},
        task | {"folder": root / "images", "arguments": GENERATE},
        task | {"folder": root / "bench", "arguments": BENCH},
        task | {"folder": root / "version", "arguments": ["inspect", "../2/profile.safetensors"]},
    )
    assert codes == [[0], [0, 0], [2, 2], [2, 2], [0, 0], [0, 0], [0, 0]]
    return root


def written(folder: Path, kind: str, rank: int) -> str:
    (path,) = folder.glob(f"{kind}-*-{rank}")
    return path.read_text()


def test_a_profile_is_the_same_and_only_the_main_process_prints(launched: Path) -> None:
    one, two = ((launched / count / "profile.safetensors").read_bytes() for count in "12")
    assert one == two
    assert written(launched / "2", "out", 0) == written(launched / "1", "out", 0)
    assert "profile: 3 of 3" in written(launched / "2", "err", 0)
    assert written(launched / "2", "out", 1) == written(launched / "2", "err", 1) == ""
    left = sorted(path.name for path in (launched / "2").iterdir())
    assert left == ["err-1-0", "err-1-1", "out-1-0", "out-1-1", "profile.safetensors"]


def test_an_error_of_one_process_ends_all_with_one_line(launched: Path) -> None:
    lines = written(launched / "failed", "err", 0).splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == ["error: process 1 failed: this process has no memory left"]
    assert not any("Traceback" in line for line in lines)
    assert written(launched / "failed", "err", 1) == ""


def test_bad_input_is_refused_once(launched: Path) -> None:
    lines = written(launched / "refused", "err", 0).splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert written(launched / "refused", "err", 1) == ""


def test_results_are_divided_and_reported_in_order(launched: Path) -> None:
    lines = written(launched / "images", "out", 0).splitlines()
    names = [f"out/000-seed{seed}-an-apple.png" for seed in (0, 1, 2)]
    assert [line.split(":")[0] for line in lines] == names
    assert all((launched / "images" / name).exists() for name in names)
    assert written(launched / "images", "out", 1) == ""


def test_the_batches_of_a_benchmark_are_divided(launched: Path) -> None:
    rows = json.loads((launched / "bench" / "bench.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"full", "fewer steps"}
    assert {row["prompts"] for row in rows} == {3}
    assert "Budget 2x" in written(launched / "bench", "out", 0)
    assert written(launched / "bench", "out", 1) == ""


def test_commands_that_run_no_model_run_once(launched: Path) -> None:
    assert "3 runs of 4 steps" in written(launched / "version", "out", 0)
    assert written(launched / "version", "out", 1) == ""


def test_accelerate_starts_the_package(tmp_path: Path) -> None:
    """As the documentation shows it; on a machine without GPUs processes are started so, too."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "accelerate.commands.launch", *OPTIONS, "-m", "ertacache"]
    done = subprocess.run(
        [*command, *PROFILE], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "profile.safetensors: a profile of 3 runs of 4 steps\n"
    profile = Policy.load(tmp_path / "profile.safetensors").profile
    assert profile is not None
    assert [run.seed for run in profile.runs] == [0, 1, 2]


def test_every_rank_of_context_parallelism_takes_the_same_decisions(tmp_path: Path) -> None:
    """Ulysses: the ranks share the tokens of one run, and a policy is attached in each of them."""
    from ertacache import calibrate
    from tests.integration.tiny import CASES

    call = {"max_sequence_length": 8, "num_inference_steps": STEPS} | CASES["flux"].arguments
    policy = calibrate(
        CASES["flux"].build(), PROMPTS[:2], compute_steps=COMPUTED, refit=False, **call
    )
    policy.save(tmp_path / "policy.safetensors")
    task = {"task": "ulysses", "count": 2, "policy": tmp_path / "policy.safetensors"}
    assert launch(task | {"folder": tmp_path / "ranks"}) == [[0, 0]]
    first, second = (torch.load(tmp_path / "ranks" / f"latents-{rank}") for rank in (0, 1))
    assert torch.equal(first["parallel"], second["parallel"])
    for found in (first, second):
        torch.testing.assert_close(found["parallel"], found["alone"], rtol=0, atol=1e-4)
