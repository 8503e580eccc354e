"""The rows of a results file: means with intervals, from the records of a journal. Runs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ertacache.bench.records import Record
from ertacache.metrics.intervals import bootstrap_interval

__all__ = ["BenchRow", "Interval", "make_row", "read_results", "write_results"]


@dataclass(frozen=True)
class BenchRow:
    """One method at one budget, as judged on held-out prompts.

    Attributes:
        model: name of the model.
        method: name of the method.
        budget: the speed-up it was turned to.
        steps: steps of a full run.
        compute_steps: steps on which the whole network ran, where that says something.
        knob: what the method was turned to.
        prompts: how many it was judged on.
        flops_ratio: the network's FLOPs over those of the full run.
        seconds: median of a call.
        speedup: median over the batches of the full run's time over this one's.
        speedup_low: its lower quartile over the batches.
        speedup_high: its upper quartile.
        cached_bytes: tensors alive in the middle of a run, beyond those of a full run.
        psnr_db: mean PSNR to the full run, with the ends of its 95 % interval.
        lead_db: mean over prompts of how much closer trajectory is at this budget, likewise.
        ssim: mean SSIM, likewise.
        lpips: mean LPIPS (AlexNet), likewise; None without its weights.
        flickering: of videos, mean of VBench's temporal flickering, likewise; 1 is a still.
        fid: of pictures, FID to given pictures; comparable only between equally many prompts.
        why_not: why the method has no numbers on this model.
    """

    model: str
    method: str
    budget: float
    steps: int
    compute_steps: int | None = None
    knob: str | None = None
    prompts: int = 0
    flops_ratio: float | None = None
    seconds: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    cached_bytes: int | None = None
    psnr_db: float | None = None
    psnr_low: float | None = None
    psnr_high: float | None = None
    lead_db: float | None = None
    lead_low: float | None = None
    lead_high: float | None = None
    ssim: float | None = None
    ssim_low: float | None = None
    ssim_high: float | None = None
    lpips: float | None = None
    lpips_low: float | None = None
    lpips_high: float | None = None
    flickering: float | None = None
    flickering_low: float | None = None
    flickering_high: float | None = None
    fid: float | None = None
    why_not: str | None = None


Interval = tuple[float, float, float]


def _interval(values: Sequence[float], digits: int) -> Interval:
    low, high = bootstrap_interval(values)
    mean = sum(values) / len(values)
    return round(mean, digits), round(low, digits), round(high, digits)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile; of few values the nearest ones.

    Example:
        >>> _quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (3.0, 2.0, 4.0)
    """
    ranked = sorted(values)
    quarter = (len(ranked) - 1) / 4
    return median(ranked), ranked[math.floor(quarter)], ranked[math.ceil(3 * quarter)]


def make_row(
    row: BenchRow,
    records: Sequence[Record],
    full: Sequence[Record],
    ours: Sequence[Record] = (),
) -> dict[str, Any]:
    """Fill a row with what was measured.

    Args:
        row: what is known before: names, cost, or why there are no numbers.
        records: of the entry.
        full: of the full run, which every time is compared with batch by batch.
        ours: of our method at the same budget, which PSNR is compared with prompt by prompt.
    """
    filled: dict[str, Any] = asdict(row)
    if not records:
        return filled
    truth = {record.batch: record.seconds for record in full}
    ratios = [truth[record.batch] / record.seconds for record in records]
    middle, low, high = _quartiles(ratios)
    filled |= {
        "prompts": sum(len(next(iter(record.scores.values()))) for record in records),
        "seconds": round(median(record.seconds for record in records), 4),
        "speedup": round(middle, 3),
        "speedup_low": round(low, 3),
        "speedup_high": round(high, 3),
    }
    for metric, digits in (("psnr", 2), ("ssim", 7), ("lpips", 7), ("flickering", 5)):
        values = [value for record in records for value in record.scores.get(metric, [])]
        if values:
            mean, low, high = _interval(values, digits)
            name = "psnr_db" if metric == "psnr" else metric
            filled |= {name: mean, f"{metric}_low": low, f"{metric}_high": high}
    if ours:
        leads = _leads(ours, records)
        filled |= dict(zip(("lead_db", "lead_low", "lead_high"), _interval(leads, 2), strict=True))
    return filled


def _leads(ours: Sequence[Record], records: Sequence[Record]) -> list[float]:
    """How much closer our method is to the full run, prompt by prompt, in dB."""
    mine = {record.batch: record.scores["psnr"] for record in ours}
    return [
        a - b
        for record in records
        for a, b in zip(mine[record.batch], record.scores["psnr"], strict=True)
    ]


def write_results(
    path: Path, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write a results file: how it came about, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**settings, "rows": list(rows)}, indent=1) + "\n")


def read_results(path: Path) -> tuple[dict[str, Any], list[BenchRow]]:
    """The settings and rows of a results file.

    Raises:
        ValueError: the file is not one of ours.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        rows = [BenchRow(**row) for row in settings.pop("rows")]
    except OSError as cause:
        raise ValueError(f"cannot read {str(path)!r}: {cause.strerror}") from cause
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise ValueError(f"{str(path)!r} is no results file of `ertacache bench`") from cause
    return settings, rows
