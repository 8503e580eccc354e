"""Tables of benchmark rows as HTML, with the numbers that the page's script sorts by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import NamedTuple

from ertacache.bench.results import FULL, TRAJECTORY, BenchRow, Interval, largest_speedup

__all__ = [
    "Reach",
    "best_first",
    "quality_table",
    "reach_of",
    "reaches",
    "reasons",
    "same_table",
    "scrollable",
    "tell_apart",
]


MISSED = 1000.0  # dB, more than any PSNR


class Cell(NamedTuple):
    """One cell: HTML, and the number that it is sorted by; None if it has none."""

    html: str
    value: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of the table of a budget.

    Attributes:
        title: its head.
        cell: the cell of a row.
        hint: what it means, shown on hover.
        always: whether it is there even if no row has a number.
    """

    title: str
    cell: Callable[[BenchRow], Cell]
    hint: str = ""
    always: bool = True


def table(
    name: str,
    head: Sequence[tuple[str, str]],
    body: Iterable[tuple[str, Sequence[Cell]]],
    *,
    sorted_by: str = "",
) -> str:
    """A table that can be sorted, in a region of its own that can be scrolled.

    Args:
        name: what it holds, for those who do not see it.
        head: title and hint of every column.
        body: the method and the cells of every row; the first cell is its head.
        sorted_by: title of the column that the rows are sorted by, the largest first.
    """
    top = "".join(
        f'<th scope="col"{_hint(hint)}{_SORTED if title == sorted_by else ""}>{title}</th>'
        for title, hint in head
    )
    lines = []
    for method, (first, *others) in body:
        ours = ' class="ours"' if method == TRAJECTORY else ""
        cells = "".join(f"<td{_value(cell)}>{cell.html}</td>" for cell in others)
        start = f'<th scope="row">{first.html}</th>'
        lines.append(f'<tr data-method="{escape(method)}"{ours}>{start}{cells}</tr>')
    body_html = f"<tbody>{''.join(lines)}</tbody>"
    return scrollable(
        f'<table class="sortable"><thead><tr>{top}</tr></thead>{body_html}</table>', name=name
    )


def scrollable(content: str, *, name: str) -> str:
    """HTML in a region of its own, which can be scrolled with the keyboard too."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">'
        f"{content}</div>"
    )


_SORTED = ' aria-sort="descending"'


def _hint(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def _value(cell: Cell) -> str:
    return "" if cell.value is None else f' data-value="{cell.value:g}"'


def _quality(row: BenchRow) -> Cell:
    """PSNR; in brackets, and last where the rows are sorted by it, if the budget is not kept."""
    shown = _interval("psnr", 2)(row)
    if row.psnr is None or row.keeps_budget:
        return shown
    return Cell(f"({shown.html})", row.psnr.value - MISSED)


def _interval(name: str, digits: int) -> Callable[[BenchRow], Cell]:
    """The cell of a quantity with its interval.

    Example:
        >>> row = BenchRow("m", "x", 2.0, 30, psnr=Interval(40.123, 39.5, 41.0))
        >>> _interval("psnr", 1)(row).html, _interval("ssim", 4)(row).html
        ('40.1 <small>39.5 to 41.0</small>', 'not available')
    """

    def cell(row: BenchRow) -> Cell:
        found: Interval | None = getattr(row, name)
        if found is None:
            return Cell("not available")
        value, low, high = (f"{number:.{digits}f}" for number in found)
        return Cell(f"{value} <small>{low} to {high}</small>", found.value)

    return cell


def _number(name: str, form: str, *, scale: float = 1.0) -> Callable[[BenchRow], Cell]:
    """The cell of a number; empty if it is not known."""

    def cell(row: BenchRow) -> Cell:
        value = getattr(row, name)
        return Cell("") if value is None else Cell(form.format(value * scale), float(value))

    return cell


_TENTH = "PSNR that nine of ten prompts exceed"
_COST = (
    Column("setting", lambda row: Cell(escape(row.setting or "")), "the method's parameter"),
    Column("FLOPs", _number("flops_ratio", "{:.3f}"), "share of the full run's"),
    Column("speed-up", _interval("speedup", 2), "in time: median over batches, quartiles"),
    Column("latency [s]", _number("seconds", "{:.2f}"), "median of a call"),
    Column("cached [kB]", _number("cached_bytes", "{:.0f}", scale=1e-3), "beyond a full run"),
)
_REALISM = (
    Column("FID ↓", _number("fid", "{:.2f}"), "to the reference images", always=False),
    Column("flickering ↑", _interval("flickering", 4), "1 is a still", always=False),
)
_QUALITY = (
    Column("LPIPS ↓", _interval("lpips", 6), "mean and its 95 % interval over prompts"),
    Column("SSIM ↑", _interval("ssim", 5), "mean and its 95 % interval over prompts"),
    Column("p10 [dB] ↑", _number("psnr_tenth", "{:.2f}"), _TENTH, always=False),
    Column("PSNR [dB] ↑", _quality, "mean and 95 % interval; in brackets above the budget"),
)


def best_first(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The closest to the full run first, then what costs more than its budget, then no numbers."""

    def place(row: BenchRow) -> tuple[bool, bool, float]:
        value = 0.0 if row.psnr is None else row.psnr.value
        return row.psnr is not None, row.keeps_budget, value

    return sorted(rows, key=place, reverse=True)


def quality_table(rows: Sequence[BenchRow], *, name: str) -> str:
    """Cost and quality of the methods that ran at one budget, the best first.

    FID, flickering and p10 are left out if no row has them.
    """
    ran = [row for row in best_first(rows) if row.why_not is None]
    there = [*_COST, *_REALISM, *_QUALITY]
    columns = [c for c in there if c.always or any(c.cell(row).value is not None for row in ran)]
    head = [("method", ""), *((column.title, column.hint) for column in columns)]
    body = [
        (row.method, [Cell(escape(row.method)), *(column.cell(row) for column in columns)])
        for row in ran
    ]
    return table(name, head, body, sorted_by=_QUALITY[-1].title)


def reasons(rows: Sequence[BenchRow]) -> str:
    """Every method that does not apply, once, and why; nothing if all do."""
    why = {row.method: row.why_not for row in rows if row.why_not is not None}
    items = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in why.items())
    return f"<p>Not applicable:</p><ul>{items}</ul>" if items else ""


@dataclass(frozen=True)
class Reach:
    """The largest speed-up of a method on a model that looks the same.

    Attributes:
        speedup: in FLOPs; where no budget looks the same, the smallest that was measured.
        bound: "exact", or "at least" if every budget looks the same, "below" if none does.
    """

    speedup: float
    bound: str

    def __str__(self) -> str:
        """As a table shows it.

        Example:
            >>> str(Reach(2.31, "exact")), str(Reach(1.5, "below")), str(Reach(5.0, "at least"))
            ('2.3x', '< 1.5x', '5.0x and more')
        """
        shown = f"{self.speedup:.1f}x"
        return {"below": f"< {shown}", "at least": f"{shown} and more"}.get(self.bound, shown)

    @property
    def counted(self) -> float:
        """The speed-up for a ranking: none where no budget looks the same."""
        return 1.0 if self.bound == "below" else self.speedup


def reach_of(rows: Sequence[BenchRow]) -> Reach | None:
    """The reach of one method on one model.

    Returns:
        None if there is nothing to tell it from; files that are older than the tenth percentile
        have nothing.
    """
    known = [row for row in rows if row.psnr_tenth is not None and row.flops_ratio]
    if not known:
        return None
    best = largest_speedup(known)
    if best is None:
        return Reach(min(1 / row.flops_ratio for row in known if row.flops_ratio), "below")
    return Reach(best[0], "at least" if best[1] else "exact")


def reaches(rows: Sequence[BenchRow]) -> dict[str, dict[str, Reach]]:
    """The largest speed-up that looks the same, by method, the best first, and model."""
    found: dict[tuple[str, str], list[BenchRow]] = {}
    for row in rows:
        if row.method != FULL:
            found.setdefault((row.method, row.model), []).append(row)
    made: dict[str, dict[str, Reach]] = {}
    for (method, model), own in found.items():
        reach = reach_of(own)
        if reach is not None:
            made.setdefault(method, {})[model] = reach
    total = {method: sum(reach.counted for reach in of.values()) for method, of in made.items()}
    return {method: made[method] for method in sorted(made, key=lambda name: -total[name])}


def tell_apart(found: Sequence[tuple[Path, list[BenchRow]]]) -> list[list[BenchRow]]:
    """Rows of several results files; models of the same name get that of their file behind it."""
    names = [{row.model for row in rows} for _, rows in found]
    stems = [path.stem for path, _ in found]
    made = []
    for place, (path, rows) in enumerate(found):
        others = set().union(*(names[:place] + names[place + 1 :]))
        label = path.stem if stems.count(path.stem) == 1 else str(path)
        made.append(
            [
                replace(row, model=f"{row.model} ({label})") if row.model in others else row
                for row in rows
            ]
        )
    return made


def same_table(rows: Sequence[BenchRow]) -> str:
    """The largest speed-up that looks the same; nothing if it was not measured."""
    found = reaches(rows)
    if not found:
        return ""
    models = list(dict.fromkeys(row.model for row in rows if row.psnr_tenth is not None))
    body = [
        (method, [Cell(escape(method)), *(_reach_cell(of.get(model)) for model in models)])
        for method, of in found.items()
    ]
    head = [("method", ""), *((escape(model), "") for model in models)]
    return table("Largest speed-up that looks the same", head, body)


def _reach_cell(reach: Reach | None) -> Cell:
    return Cell("") if reach is None else Cell(escape(str(reach)), reach.counted)
