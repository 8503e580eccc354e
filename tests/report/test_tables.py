"""Tables of rows with and without numbers."""

from __future__ import annotations

from ertacache.bench.results import BenchRow, Interval
from ertacache.report.tables import cost_table, quality_table

SILENT = BenchRow("m", "T-GATE", 2.0, 30, why_not="no cross-attention")


def test_a_method_without_numbers_is_last_and_has_no_cost() -> None:
    ran = BenchRow("m", "x", 2.0, 30, psnr=Interval(1.0, 1.0, 1.0))
    table = quality_table([SILENT, ran])
    assert table.index(">x<") < table.index("T-GATE")
    assert "T-GATE" not in cost_table([SILENT, ran])
