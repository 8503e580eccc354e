"""``bench``: what it hands on, how it prints the rows, and what it refuses before any work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ertacache.bench.bench import Bench
from ertacache.bench.methods import IDENTIFIERS
from ertacache.bench.results import BenchRow, Interval
from ertacache.calibration.session import HELDOUT_SEED
from ertacache.models.zoo import load_prompts
from tests.cli.conftest import Refused, Run, messages

ROW = BenchRow(
    "emoji-flux",
    "trajectory",
    2.0,
    steps=6,
    flops_ratio=0.5,
    speedup=Interval(1.9, 1.8, 2.0),
    psnr=Interval(61.25, 60.0, 62.0),
    ssim=Interval(0.998, 0.997, 0.999),
    cached_bytes=123_000,
)


def test_what_is_run_and_printed(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Bench] = []
    psnr, lpips = Interval(40.0, 39.0, 41.0), Interval(0.1, 0.1, 0.1)
    worse = replace(ROW, method="fewer steps", psnr=psnr, lpips=lpips)
    never = replace(ROW, method="T-GATE", psnr=None, why_not="no cross-attention")
    full = replace(ROW, method="full", budget=1.0)

    def measure(self: Bench, stage: object) -> list[BenchRow]:
        begun.append(self)
        return [full, never, worse, ROW]

    monkeypatch.setattr(Bench, "run", measure)
    path = tmp_path / "bench.json"
    options = ["--budgets", "2,3", "--limit", 2, "--calibration", 3, "--seed", 7, "--steps", 6]
    more = ["--methods", "trajectory, Paper-No-Timesteps,fewer-steps"]
    result = run("bench", "emoji-flux", *options, *more, "-o", path)
    assert result.exit_code == 0, result.output
    (bench,) = begun
    assert (bench.output, bench.budgets) == (path, (2.0, 3.0))
    assert bench.methods == ["trajectory", "paper, no timesteps", "fewer steps"]
    assert bench.command.startswith("ertacache bench emoji-flux --budgets 2,3 --limit 2")
    assert (bench.work.steps, bench.work.session.batch_size) == (6, 8)
    fitted, heldout = bench.work.calibration, bench.work.heldout
    assert [each.prompt for each in fitted] == load_prompts("emoji-flux", "calibration")[:3]
    assert [each.prompt for each in heldout] == load_prompts("emoji-flux", "heldout")[:2]
    assert [each.seed for each in fitted] == [7, 8, 9]
    assert [each.seed for each in heldout] == [7 + HELDOUT_SEED, 8 + HELDOUT_SEED]
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0] == ["Budget", "2x"]
    assert lines[3:6] == [
        ["trajectory", "0.500", "1.90x", "61.25", "dB", "0.9980", "not", "available", "123", "kB"],
        ["fewer", "steps", "0.500", "1.90x", "40.00", "dB", "0.9980", "0.1000", "123", "kB"],
        ["T-GATE", "not", "applicable"],
    ]
    assert lines[6:] == [["Results", "in", str(path)]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budgets", "2,x"], "--budgets takes numbers separated by commas, got '2,x'"),
        (["--budgets", "2,1"], "finite and greater than 1, got '2,1'"),
        (["--methods", "magic"], "no such method: 'magic'; the nearest is magcache, and there are"),
        (["--methods", "paper, no timesteps"], "the nearest is paper-no-timesteps, and there are"),
        (["--methods", ""], "methods are separated by single commas, got ''"),
        (["--heldout", "absent.txt"], "cannot read prompts from 'absent.txt'"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_wrong_options(options: list[str], words: str, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "bench.json"
    assert words in refused("bench", "emoji-flux", *options, "-o", path)
    assert not path.exists()


def test_the_help_lists_every_method_by_its_identifier(run: Run) -> None:
    words = re.split(r"[\s,]+", run("bench", "--help").stdout)
    assert set(IDENTIFIERS) <= set(words)


def test_more_than_half_of_the_steps_is_refused_before_any_run(
    tmp_path: Path, refused: Refused
) -> None:
    line = refused("bench", "emoji-flux", "--steps", 4, "--budgets", 3, "-o", tmp_path / "b.json")
    assert "budgets of 4 steps are at most 2, so that two are computed, got 3" in line
    assert not list(tmp_path.iterdir())


def test_an_interrupted_benchmark_reports_that_the_same_command_continues(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, journal = tmp_path / "bench.json", tmp_path / "bench.journal.jsonl"

    def interrupt(self: Bench, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "prepare", interrupt)
    result = run("bench", "emoji-flux", "--steps", 6, "--methods", "uniform", "-o", path)
    assert result.exit_code == 130
    assert messages(result) == [
        f"interrupted: the measurements so far are in {journal}; the same command continues from "
        "there"
    ]
    assert journal.exists()


def test_prompts_and_steps_of_a_model_that_is_not_bundled(
    tmp_path: Path, prompts_file: Path, variant: Any, refused: Refused
) -> None:
    arguments = ["bench", variant(), "--prompts", prompts_file, "-o", tmp_path / "bench.json"]
    assert "give a file with --heldout" in refused(*arguments)
    heldout = tmp_path / "heldout.txt"
    heldout.write_text("a cat\n")
    arguments += ["--heldout", heldout]
    assert "number of steps of a full run with --steps" in refused(*arguments)
    heldout.write_text("a cat\na red apple\n")
    line = refused(*arguments, "--steps", 4)
    assert "a held-out prompt is also a calibration prompt: 'a red apple'" in line
