"""The page about metrics lists every metric, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.metrics import METRICS, psnr

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_metric_has_its_row() -> None:
    rows = re.findall(r"^\| (`.*?`) \|.*\| (higher|lower) \|", PAGE, re.M)
    listed = {name: better for names, better in rows for name in re.findall(r"`(.*?)`", names)}
    assert listed == {
        name: "higher" if metric.higher_is_better else "lower" for name, metric in METRICS.items()
    }


def test_the_code_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/metrics.md", "exec"), names)
    assert names["decibels"].shape == (4,)
    assert [score.metric for score in names["scores"]] == ["psnr", "ssim", "lpips-alex"]
    assert names["scores"][0].mean == pytest.approx(names["decibels"].mean().item())


def test_the_two_kinds_of_psnr_are_as_stated() -> None:
    video = torch.tensor([0.1, 0.01]).reshape(1, 2, 1, 1, 1).expand(1, 2, 3, 4, 4)
    black = torch.zeros_like(video)
    by_frame = psnr(video[0], black[0]).mean().item()
    stated = f"pooled PSNR is {psnr(video, black).item():.1f} dB"
    assert f"{stated} and the mean over frames {by_frame:.1f} dB" in PAGE
