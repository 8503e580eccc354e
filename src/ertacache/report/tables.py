"""Tables of benchmark rows as HTML. Knows rows, not how they came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ertacache.bench.rows import BenchRow

__all__ = ["best_first", "cost_table", "quality_table"]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; the first column is of words."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    lines = ["".join(f"<td>{cell}</td>" for cell in line) for line in body]
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>"


def _interval(mean: float | None, low: float | None, high: float | None, digits: int) -> str:
    """A mean and its interval.

    Example:
        >>> _interval(40.123, 39.5, 41.0, 1), _interval(None, None, None, 1)
        ('40.1 <small>39.5 to 41.0</small>', 'not available')
    """
    if mean is None or low is None or high is None:
        return "not available"
    return f"{mean:.{digits}f} <small>{low:.{digits}f} to {high:.{digits}f}</small>"


def best_first(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The closest to the full run first, those without numbers last."""
    return sorted(rows, key=lambda row: -(row.psnr_db if row.psnr_db is not None else -1.0))


def _more_columns(rows: Sequence[BenchRow]) -> dict[str, Callable[[BenchRow], str]]:
    """What only pictures, or only videos, are judged by."""
    columns: dict[str, Callable[[BenchRow], str]] = {}
    if any(row.fid is not None for row in rows):
        columns["FID ↓"] = lambda row: "" if row.fid is None else f"{row.fid:.2f}"
    if any(row.flickering is not None for row in rows):
        columns["flickering ↑"] = lambda row: (
            "" if row.flickering is None else f"{row.flickering:.4f}"
        )
    return columns


def quality_table(rows: Sequence[BenchRow]) -> str:
    """The paper's columns at one budget, with FID of pictures or flickering of videos."""
    more = _more_columns(rows)
    head = ("method", "turned to", "FLOPs", "speed-up", "latency", *more)
    head += ("LPIPS ↓", "SSIM ↑", "PSNR ↑")
    body = []
    for row in best_first(rows):
        name = escape(row.method)
        if row.why_not is not None:
            body.append([name, f"not applicable: {escape(row.why_not)}", *[""] * (len(head) - 2)])
            continue
        body.append(
            [
                name,
                escape(row.knob or ""),
                f"{row.flops_ratio or 0.0:.3f}",
                f"{row.speedup or 0.0:.2f}x",
                f"{row.seconds or 0.0:.2f} s",
                *(show(row) for show in more.values()),
                _interval(row.lpips, row.lpips_low, row.lpips_high, 6),
                _interval(row.ssim, row.ssim_low, row.ssim_high, 5),
                _interval(row.psnr_db, row.psnr_low, row.psnr_high, 2),
            ]
        )
    return _table(head, body)


def cost_table(rows: Sequence[BenchRow]) -> str:
    """Memory and latency of every method that ran."""
    head = ("method", "budget", "cached", "latency", "speed-up, quartiles over batches")
    body = [
        [
            escape(row.method),
            f"{row.budget:g}x",
            f"{(row.cached_bytes or 0) / 1e3:.0f} kB",
            f"{row.seconds or 0.0:.2f} s",
            _interval(row.speedup, row.speedup_low, row.speedup_high, 2),
        ]
        for row in rows
        if row.why_not is None
    ]
    return _table(head, body)
