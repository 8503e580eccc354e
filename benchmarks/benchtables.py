"""The tables of ``ertacache bench`` as Markdown: cost and fidelity of every method per model.

Reads ``results/bench-MODEL.json``, runs nothing. Each model gets a sentence per budget on where our
method leads, derived from the rows, then one table per budget with the paper's columns, the
ablation, and the methods that do not apply. ``tables.py`` writes it into the pages of ``docs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rows import RESULTS, ROOT

from ertacache.bench import methods
from ertacache.bench.results import BenchRow, Interval, read_results
from ertacache.models import MODELS
from ertacache.report.tables import best_first, reach_of, reaches

OURS = "trajectory"
TOLERANCE = 0.05  # relative difference in FLOPs within which a baseline is compared with ours
SUMMARY = (2.0, 3.0)  # budgets of the summary and of the first page
MOST = 3  # baselines named in a sentence, and on the first page
# Name in a table: field of a row, digits, whether more is better.
METRICS = {
    "PSNR": ("psnr", 2, True),
    "SSIM": ("ssim", 5, True),
    "LPIPS": ("lpips", 6, False),
}
# Columns of images only, or of videos only.
REALISM = {"FID ↓": "fid", "flickering ↑": "flickering"}
# The paper's ablation, part by part, then ours.
PARTS = {
    "uniform": "uniform reuse",
    "paper, policy only": "paper: offline policy",
    "paper, no timesteps": "paper: policy + error rectification",
    "paper": "paper: policy + error rectification + timestep adjustment",
    "trajectory, no refit": "ours, without the refit",
    "trajectory": "ours: trajectory rectification",
}


def bench_files(folder: Path = RESULTS) -> dict[str, Path]:
    """The results files that are there, by model: bundled models in their order, then others."""
    found = {path.stem.removeprefix("bench-"): path for path in folder.glob("bench-*.json")}
    known = [name for name in MODELS if name in found]
    return {name: found[name] for name in [*known, *sorted(found.keys() - MODELS.keys())]}


def read_bench() -> list[BenchRow]:
    """The rows of all results files."""
    return [row for path in bench_files().values() for row in read_results(path)[1]]


def summary_table(rows: Sequence[BenchRow]) -> str:
    """PSNR of every method on every model at the summary's budgets."""
    ran = [row for row in rows if row.method != "full" and row.budget in SUMMARY]
    found = {(row.method, row.model, row.budget): row for row in ran}
    columns = sorted({(row.model, row.budget) for row in ran}, key=lambda c: _place(*c))
    if not columns:
        return "Not measured yet."
    head = [
        "PSNR, dB",
        *(f"{model.removeprefix('emoji-')} {budget:g}x" for model, budget in columns),
    ]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * len(columns)]
    for method in _ranked(ran):
        cells = [_summary_cell(found.get((method, *column)), column[1]) for column in columns]
        name = f"**{method}**" if method == OURS else method
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def front_table(rows: Sequence[BenchRow]) -> str:
    """Ours and the best baselines: how far they look the same, and their PSNR; the first page."""
    found = [row for row in rows if row.method != "full" and row.psnr is not None]
    shown = [row for row in found if row.budget in SUMMARY]
    models = sorted({row.model for row in shown}, key=lambda m: _place(m, 0))
    shown_methods = [OURS, *best_baselines(shown)]
    if not models or not any(row.method == OURS for row in shown):
        return "Not measured yet."
    lines = [
        f"| | {' | '.join(model.removeprefix('emoji-') for model in models)} |",
        "|---|" + "--:|" * len(models),
    ]
    parts = [("looks the same up to", _same_cell), ("PSNR at 2x / 3x, dB", _psnr_cell)]
    if any(row.psnr_tenth is None for row in shown if row.method == OURS):  # a file of before
        parts = parts[1:]
    for title, cell in parts:
        lines.append(f"| *{title}* |{' |' * len(models)}")
        for method in shown_methods:
            own = [row for row in found if row.method == method]
            cells = [cell([row for row in own if row.model == model]) for model in models]
            lines.append(
                f"| {'**ertacache**' if method == OURS else method} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def best_baselines(rows: Sequence[BenchRow]) -> list[str]:
    """The baselines with the best mean rank in PSNR, over models and budgets that they kept to.

    One that kept to fewer than half of them does not count, and neither do parts of a method.
    """
    places: dict[tuple[str, float], list[tuple[float, str]]] = {}
    for row in rows:
        here = places.setdefault((row.model, row.budget), [])
        if row.psnr and row.keeps_budget and _is_baseline(row.method):
            here.append((-row.psnr.value, row.method))
    ranks: dict[str, list[int]] = {}
    for here in places.values():
        for rank, (_, method) in enumerate(sorted(here)):
            ranks.setdefault(method, []).append(rank)
    known = {name: sum(r) / len(r) for name, r in ranks.items() if 2 * len(r) >= len(places)}
    return sorted(known, key=lambda name: known[name])[:MOST]


def _is_baseline(method: str) -> bool:
    """Whether it is neither ours nor a part of a method."""
    return not method.startswith(OURS) and method not in methods.PARTS


def _psnr_cell(rows: Sequence[BenchRow]) -> str:
    """The means of a method on a model, budget by budget."""
    found = {row.budget: row for row in rows}
    cells = [_summary_cell(found.get(budget), budget) for budget in SUMMARY]
    return " / ".join(cells) if set(cells) != {"-"} else "-"


def _same_cell(rows: Sequence[BenchRow]) -> str:
    """The largest speed-up of a method on a model that looks the same."""
    return str(reach_of(rows) or "-")


def same_table(rows: Sequence[BenchRow]) -> str:
    """The largest speed-up that looks the same, of every method on every model."""
    found = reaches(rows)
    models = sorted({model for of in found.values() for model in of}, key=lambda m: _place(m, 0))
    if not models:
        return "Not measured yet."
    lines = [f"| method | {' | '.join(models)} |", "|---|" + "--:|" * len(models)]
    for method, of in found.items():
        name = f"**{method}**" if method == OURS else method
        lines.append(f"| {' | '.join([name, *(str(of.get(m, '-')) for m in models)])} |")
    return "\n".join(lines)


def _place(model: str, budget: float) -> tuple[int, str, float]:
    """Bundled models in their order, then others."""
    known = list(MODELS)
    return (known.index(model) if model in known else len(known), model, budget)


def _ranked(rows: Sequence[BenchRow]) -> list[str]:
    """Methods by their mean PSNR over what they ran on; last those that ran on nothing."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row.method, []).extend([] if row.psnr is None else [row.psnr.value])
    means = {name: sum(found) / len(found) if found else 0.0 for name, found in values.items()}
    return sorted(means, key=lambda name: -means[name])


def _summary_cell(row: BenchRow | None, budget: float) -> str:
    """A mean; in brackets where the method did not come within the tolerance of the budget."""
    if row is None or row.psnr is None or row.flops_ratio is None:
        return "-"
    return f"{row.psnr.value:.1f}" if row.keeps_budget else f"({row.psnr.value:.1f})"


def model_table(rows: Sequence[BenchRow]) -> str:
    """All that is known of a model."""
    if not rows:
        return "Not measured yet."
    ran = [row for row in rows if row.method != "full" and row.why_not is None]
    full = next((row for row in rows if row.method == "full"), None)
    steps, prompts = rows[0].steps, max(row.prompts for row in rows)
    text = f"{steps} steps, {prompts} held-out prompts."
    if full is not None and full.seconds is not None:
        text += f" The full run takes {full.seconds:.2f} s per call (median)."
    if full is not None and full.fid is not None:
        text += f" Its FID is {full.fid:.3f}."
    if full is not None and full.flickering is not None:
        text += f" Its flickering is {full.flickering.value:.3f}."
    budgets = sorted({row.budget for row in ran})
    by_budget = {b: [row for row in ran if row.budget == b] for b in budgets}
    parts = [text]
    parts += [sentence for b in budgets if (sentence := verdict(by_budget[b]))]
    image = ROOT / "docs" / "images" / f"pareto-{rows[0].model}.png"
    if image.exists():
        title = f"PSNR of every method against its speed-up, {rows[0].model}"
        parts.append(f"![{title}](images/{image.name})")
    for budget in budgets:
        parts += [f"## At {budget:g}x", main_table(by_budget[budget])]
    parts += ["## Ablation", ablation_table(ran)]
    inapplicable = [row for row in rows if row.why_not is not None]
    if inapplicable:
        parts += ["## Not applicable", reasons(inapplicable)]
    return "\n\n".join(parts)


def main_table(rows: Sequence[BenchRow]) -> str:
    """The paper's columns at one budget, the highest fidelity first."""
    more = {
        title: name
        for title, name in REALISM.items()
        if any(getattr(row, name) is not None for row in rows)
    }
    head = ["method", "setting", "FLOPs", "speed-up", "latency, s", *more]
    head += ["LPIPS ↓ (95 %)", "SSIM ↑ (95 %)", "PSNR ↑, dB (95 %)", "p10 ↑, dB", "cached, kB"]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "--:|" * (len(head) - 2)]
    for row in best_first(rows):
        cells = [
            f"**{row.method}**" if row.method == OURS else row.method,
            row.setting or "",
            _number(row.flops_ratio, 3),
            _number(row.speedup, 2),
            _number(row.seconds, 2),
            *(_number(getattr(row, name), 3) for name in more.values()),
            *(shown(row, metric) for metric in ("LPIPS", "SSIM", "PSNR")),
            _number(row.psnr_tenth, 1),
            "" if row.cached_bytes is None else f"{row.cached_bytes / 1e3:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ablation_table(rows: Sequence[BenchRow]) -> str:
    """The parts of the paper's method, and ours, at every budget."""
    lines = [
        "| parts | budget | LPIPS ↓ (95 %) | SSIM ↑ (95 %) | PSNR ↑, dB (95 %) |",
        "|---|--:|--:|--:|--:|",
    ]
    for budget in sorted({row.budget for row in rows}):
        there = {row.method: row for row in rows if row.budget == budget}
        for method, title in PARTS.items():
            if method in there:
                values = [shown(there[method], metric) for metric in ("LPIPS", "SSIM", "PSNR")]
                lines.append(f"| {title} | {budget:g}x | {' | '.join(values)} |")
    return "\n".join(lines)


def reasons(rows: Sequence[BenchRow]) -> str:
    """Every method that has no numbers, once, and why."""
    why = {row.method: row.why_not or "" for row in rows}
    lines = [f"| {method} | {text} |" for method, text in why.items()]
    return "\n".join(["| method | why not |", "|---|---|", *lines])


def verdict(rows: Sequence[BenchRow]) -> str:
    """Where ours leads at one budget and where it does not; empty if ours did not run."""
    ours = next((row for row in rows if row.method == OURS), None)
    if ours is None or ours.flops_ratio is None:
        return ""
    others = [row for row in rows if not row.method.startswith(OURS)]
    margin = TOLERANCE * ours.flops_ratio
    baselines = [r for r in others if (r.flops_ratio or 0.0) <= ours.flops_ratio + margin]
    apart = [r for r in others if abs((r.flops_ratio or 0.0) - ours.flops_ratio) > margin]
    found = [(metric, _standing(ours, baselines, metric, apart)) for metric in METRICS]
    clear = [metric for metric, state in found if state == "clear"]
    parts = []
    if clear:
        parts.append(f"leads in {_list(clear)} with an interval apart from every baseline's")
    parts += [f"{state} in {metric}" for metric, state in found if state not in ("", "clear")]
    text = (
        f"At {ours.budget:g}x trajectory {'; '.join(parts) or 'has no baseline to compare with'}."
    )
    text += _leads(ours, baselines)
    if apart:
        names = _list([f"*{row.method}* ({row.flops_ratio:.2f})" for row in apart])
        text += f" Of another cost than trajectory ({ours.flops_ratio:.2f} of the FLOPs), and "
        text += f"counted only where cheaper and better: {names}."
    return text


def _leads(ours: BenchRow, baselines: Sequence[BenchRow]) -> str:
    """How far ours is ahead prompt by prompt, of each baseline whose interval overlaps."""
    leads = []
    mine = interval(ours, "PSNR")
    for row in best_first(baselines):
        other = interval(row, "PSNR")
        if mine is None or other is None or row.lead is None:
            continue
        if _overlap(mine, other):
            side = "above" if row.lead.value >= 0 else "below"
            spread = f"{row.lead.low:+.1f} to {row.lead.high:+.1f}"
            leads.append(f"{abs(row.lead.value):.1f} dB {side} that of *{row.method}* ({spread})")
    return f" Prompt by prompt its PSNR is {_list(leads)}." if leads else ""


def _standing(
    ours: BenchRow, baselines: Sequence[BenchRow], metric: str, apart: Sequence[BenchRow]
) -> str:
    """``"clear"``, or in words which methods are as good or better; empty if not measured.

    Baselines that are also in ``apart`` cost less: they count only where they are ahead.
    """
    mine = interval(ours, metric)
    if mine is None:
        return ""
    sign = 1.0 if METRICS[metric][2] else -1.0
    measured = [
        (row.method, found)
        for row in baselines
        if (found := interval(row, metric))
        and (row not in apart or sign * (found.value - mine.value) > 0)
    ]
    if not measured:
        return ""
    measured.sort(key=lambda one: -sign * one[1].value)
    ahead = [name for name, other in measured if sign * other.value > sign * mine.value]
    near = [name for name, other in measured if _overlap(mine, other)]
    clearly = [name for name in ahead if name not in near]
    if clearly:
        return f"is behind {_names(clearly)} (intervals apart)"
    if ahead:
        return f"is behind {_names(ahead)} (intervals overlap)"
    if near:
        return f"has the best mean, with an interval that overlaps that of {_names(near)},"
    return "clear"


def interval(row: BenchRow, metric: str) -> Interval | None:
    """A mean and its interval, None where it was not measured."""
    found: Interval | None = getattr(row, METRICS[metric][0])
    return found


def _overlap(a: Interval, b: Interval) -> bool:
    return a.low <= b.high and b.low <= a.high


def shown(row: BenchRow, metric: str) -> str:
    """A mean and its interval in a cell."""
    found, digits = interval(row, metric), METRICS[metric][1]
    if found is None:
        return "not available"
    mean, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{mean} ({low} to {high})"


def _number(value: float | Interval | None, digits: int) -> str:
    if isinstance(value, Interval):
        value = value.value
    return "" if value is None else f"{value:.{digits}f}"


def _names(names: Sequence[str]) -> str:
    """Methods in a sentence, the best first; the tables list all of them."""
    shown = [f"*{name}*" for name in names[:MOST]]
    return _list([*shown, f"{len(names) - MOST} more"] if len(names) > MOST else shown)


def _list(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
