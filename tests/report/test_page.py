"""The page: complete, self-contained, and safe against HTML in the files."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.bench.results import BenchRow, Interval, write_results
from ertacache.bench.samples import Samples
from ertacache.figures import PALETTE
from ertacache.metrics.image import to_image
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
    assert "<li>T-GATE: no cross-attention &amp; no &lt;hope&gt;</li>" in page
    assert "not available" in page  # ours has no LPIPS
    assert "0.100000 <small>0.000000 to 0.200000</small>" in page
    assert "<m>" not in page
    assert '<td data-value="123000">123</td>' in page


def test_the_page_loads_nothing_and_is_the_same_twice(results: Path) -> None:
    page = make_page([results])
    assert page == make_page([results])
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"@import|url\((?!#)", page)


def test_the_browser_may_run_nothing_but_our_script(results: Path) -> None:
    page = make_page([results])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';")
    assert policy.endswith(f"script-src 'sha256-{digest}'")


def test_every_variable_of_the_style_is_defined(results: Path) -> None:
    page = make_page([results])
    set_by_parts = {"frames", "seconds", "at"}
    assert set(re.findall(r"var\(--([\w-]+)\)", page)) <= PALETTE.keys() | set_by_parts


@pytest.mark.parametrize("shape", [(3, 4, 4), (5, 3, 4, 4)], ids=["images", "videos"])
def test_samples_of_what_stands_out_are_inside(results: Path, shape: tuple[int, ...]) -> None:
    samples = Samples(results.with_suffix(".samples.safetensors"))
    for method, budget in (("trajectory", 2.0), ("full", 1.0), ("trajectory", 3.0), ("x", 2.0)):
        samples.add(method, budget, torch.rand(2, *shape))
    samples.save(["a <b>", "c"])
    page = make_page([results])
    assert page.count("data:image/webp") == 4  # two prompts, the full run and the one at 2x
    assert page.index('alt="full: ') < page.index('alt="trajectory: ')
    assert "a &lt;b&gt;" in page
    assert "<b>" not in page


def test_old_and_new_results(results: Path) -> None:
    assert "Largest speed-up that looks the same" not in make_page([results])
    new = [replace(row, psnr_tenth=50.0) for row in (FULL, ROW)]
    write_results(results, {}, new)
    assert "Largest speed-up that looks the same" in make_page([results])


def test_folders_and_progress(results: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<out>"
    folder.mkdir()
    for name in ("a", "a-full", "b", "b-full"):
        to_image(torch.rand(3, 8, 8)).save(folder / f"{name}.png")
    seen: list[tuple[int, int]] = []
    page = make_page([results, folder], progress=lambda *done: seen.append(done))
    assert seen == [(k, 4) for k in range(1, 5)]  # the plot, a budget, two pairs
    assert page.count('<figure class="pair">') == 2
    assert "<out>" not in page
    assert page.count("<section") == page.count("</section>") == 1
    assert "<h1>Compared with the full run</h1>" in make_page([folder])
