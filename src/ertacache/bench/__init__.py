"""The benchmark: every method on the same prompts and seeds, in one process."""

from ertacache.bench.bench import BUDGETS, Bench
from ertacache.bench.results import BenchRow, Interval, read_results
from ertacache.bench.workload import Workload

__all__ = ["BUDGETS", "Bench", "BenchRow", "Interval", "Workload", "read_results"]
