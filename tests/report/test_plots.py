"""The Pareto plot shows every method that ran, and no other."""

from __future__ import annotations

from ertacache.bench.rows import BenchRow
from ertacache.report.plots import pareto


def test_methods_that_ran_stand_in_the_legend() -> None:
    rows = [
        BenchRow("m", name, 2.0, 30, flops_ratio=0.5, psnr_db=40.0, psnr_low=39.0, psnr_high=41.0)
        for name in ("trajectory", "full", *(f"rival {k}" for k in range(14)))
    ]
    picture = pareto([*rows, BenchRow("m", "T-GATE", 2.0, 30, why_not="no")])
    assert picture.startswith("<svg")
    for name in ("trajectory", "rival 0", "rival 13"):
        assert name in picture
    assert "T-GATE" not in picture
    assert ">full<" not in picture
