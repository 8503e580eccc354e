"""The benchmark: every method on the same prompts and seeds, in one process. Knows no report."""

from ertacache.bench.procedure import BUDGETS, Bench
from ertacache.bench.rows import BenchRow, read_results
from ertacache.bench.workload import Workload

__all__ = ["BUDGETS", "Bench", "BenchRow", "Workload", "read_results"]
