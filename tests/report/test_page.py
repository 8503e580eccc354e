"""The page: complete, self-contained, and safe against HTML in the files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.bench.results import BenchRow, Interval, write_results
from ertacache.bench.samples import Samples
from ertacache.report.page import make_page

ROW = BenchRow(
    model="<m>",
    method="trajectory",
    budget=2.0,
    steps=30,
    compute_steps=15,
    setting="15 steps",
    prompts=64,
    flops_ratio=0.5,
    seconds=1.25,
    speedup=Interval(1.9, 1.8, 2.0),
    cached_bytes=123_000,
    psnr=Interval(61.25, 60.5, 62.0),
    ssim=Interval(0.998, 0.997, 0.999),
)
FULL = replace(ROW, method="full", budget=1.0, psnr=Interval(100.0, 100.0, 100.0), flops_ratio=1.0)
WORSE = replace(ROW, method="fewer <steps>", psnr=Interval(40.0, 39.0, 41.0))
WORSE = replace(WORSE, lpips=Interval(0.1, 0.0, 0.2))
SILENT = BenchRow("<m>", "T-GATE", 2.0, 30, why_not="no cross-attention & no <hope>")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    settings = {"model": "<m>", "command": "ertacache bench"}
    write_results(path, settings, [FULL, WORSE, ROW, SILENT])
    return path


def test_tables_have_the_numbers_best_first_and_the_reasons(results: Path) -> None:
    page = make_page([results])
    assert "61.25 <small>60.50 to 62.00</small>" in page
    assert page.index("61.25") < page.index("40.00 <small>")
    assert "not applicable: no cross-attention &amp; no &lt;hope&gt;" in page
    assert "not available" in page  # ours has no LPIPS
    assert "0.100000 <small>0.000000 to 0.200000</small>" in page
    assert "<m>" not in page
    assert "123 kB" in page


def test_the_page_loads_nothing_and_is_the_same_twice(results: Path) -> None:
    page = make_page([results])
    assert page == make_page([results])
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "<script" not in page


@pytest.mark.parametrize("shape", [(3, 4, 4), (5, 3, 4, 4)], ids=["images", "videos"])
def test_samples_are_inside(results: Path, shape: tuple[int, ...]) -> None:
    samples = Samples(results.with_suffix(".samples.safetensors"))
    for method, budget in (("trajectory", 2.0), ("full", 1.0), ("trajectory", 3.0)):
        samples.add(method, budget, torch.rand(2, *shape))
    samples.save(["a <b>", "c"])
    page = make_page([results])
    assert page.count("data:image/webp") == 4  # two prompts, the full run and the one at 2x
    assert page.index('alt="full"') < page.index('alt="trajectory"')
    assert "a &lt;b&gt;" in page
