"""The page about metrics lists every metric, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ertacache.metrics import METRICS

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
