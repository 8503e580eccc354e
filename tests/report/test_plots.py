"""The Pareto plot shows every method that applies, and no other."""

from __future__ import annotations

from ertacache.bench.results import BenchRow, Interval
from ertacache.report.plots import pareto


def test_methods_that_apply_are_in_the_legend() -> None:
    rows = [
        BenchRow("m", name, 2.0, 30, flops_ratio=0.5, psnr=Interval(40.0, 39.0, 41.0))
        for name in ("trajectory", "full", *(f"baseline {k}" for k in range(14)))
    ]
    plot = pareto([*rows, BenchRow("m", "T-GATE", 2.0, 30, why_not="no")])
    assert plot.startswith("<svg")
    for name in ("trajectory", "baseline 0", "baseline 13"):
        assert name in plot
    assert "T-GATE" not in plot
    assert ">full<" not in plot
