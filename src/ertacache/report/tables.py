"""Tables of benchmark rows as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ertacache.bench.results import BenchRow, Interval

__all__ = ["best_first", "cost_table", "quality_table"]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    lines = ["".join(f"<td>{cell}</td>" for cell in line) for line in body]
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>"


def _interval(found: Interval | None, digits: int) -> str:
    """A value and its interval.

    Example:
        >>> _interval(Interval(40.123, 39.5, 41.0), 1), _interval(None, 1)
        ('40.1 <small>39.5 to 41.0</small>', 'not available')
    """
    if found is None:
        return "not available"
    value, low, high = (f"{number:.{digits}f}" for number in found)
    return f"{value} <small>{low} to {high}</small>"


def best_first(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The closest to the full run first, rows without numbers last."""
    return sorted(rows, key=lambda row: -1.0 if row.psnr is None else row.psnr.value, reverse=True)


def _more_columns(rows: Sequence[BenchRow]) -> dict[str, Callable[[BenchRow], str]]:
    """Columns that only images, or only videos, have."""
    columns: dict[str, Callable[[BenchRow], str]] = {}
    if any(row.fid is not None for row in rows):
        columns["FID ↓"] = lambda row: "" if row.fid is None else f"{row.fid:.2f}"
    if any(row.flickering is not None for row in rows):
        columns["flickering ↑"] = lambda row: (
            "" if row.flickering is None else f"{row.flickering.value:.4f}"
        )
    return columns


def quality_table(rows: Sequence[BenchRow]) -> str:
    """The paper's columns at one budget, with FID of images or flickering of videos."""
    more = _more_columns(rows)
    head = ("method", "setting", "FLOPs", "speed-up", "latency", *more)
    head += ("LPIPS ↓", "SSIM ↑", "PSNR ↑", "PSNR, p10 ↑")
    body = []
    for row in best_first(rows):
        name = escape(row.method)
        if row.why_not is not None:
            body.append([name, f"not applicable: {escape(row.why_not)}", *[""] * (len(head) - 2)])
            continue
        body.append(
            [
                name,
                escape(row.setting or ""),
                f"{row.flops_ratio or 0.0:.3f}",
                "" if row.speedup is None else f"{row.speedup.value:.2f}x",
                f"{row.seconds or 0.0:.2f} s",
                *(show(row) for show in more.values()),
                _interval(row.lpips, 6),
                _interval(row.ssim, 5),
                _interval(row.psnr, 2),
                "" if row.psnr_tenth is None else f"{row.psnr_tenth:.2f}",
            ]
        )
    return _table(head, body)


def cost_table(rows: Sequence[BenchRow]) -> str:
    """Memory and latency of every method that applies."""
    head = ("method", "budget", "cached", "latency", "speed-up, quartiles over batches")
    body = [
        [
            escape(row.method),
            f"{row.budget:g}x",
            f"{(row.cached_bytes or 0) / 1e3:.0f} kB",
            f"{row.seconds or 0.0:.2f} s",
            _interval(row.speedup, 2),
        ]
        for row in rows
        if row.why_not is None
    ]
    return _table(head, body)
