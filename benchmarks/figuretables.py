"""Tables, captions and sentences of ``docs/figures-*.md`` and ``docs/overhead.md``.

Runs nothing; ``tables.py`` writes them into the pages. A plot is shown if its file exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rows import ROOT, Row

IDEAL = 95.0  # target of the loop, percent of the ideal speed-up
EMPTY = "Not measured yet."


def sections(
    rows: Sequence[Row], make: Callable[[list[Row]], list[str]], heading: str = "##"
) -> str:
    """One section per model, of the paragraphs that ``make`` returns."""
    models = dict.fromkeys(row["model"] for row in rows)
    parts = [[f"{heading} {m}", *make([row for row in rows if row["model"] == m])] for m in models]
    return "\n\n".join(paragraph for part in parts for paragraph in part) or EMPTY


def image(name: str, title: str) -> list[str]:
    """A plot, if its file exists."""
    there = (ROOT / "docs" / "images" / name).exists()
    return [f"![{title}](images/{name})"] if there else []


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Cells as Markdown; the first column is left-aligned."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sensitivity_table(rows: Sequence[Row]) -> str:
    """Per model the plot, a sentence per budget and a table per budget."""
    return sections(rows, _sensitivity)


def _sensitivity(rows: list[Row]) -> list[str]:
    first = rows[0]
    parts = [f"{first['steps']} steps, {first['heldout']} held-out prompts."]
    name = f"sensitivity-{first['model']}.png"
    parts += image(name, f"PSNR against the number of calibration prompts, {first['model']}")
    for budget in sorted({row["budget"] for row in rows}, reverse=True):
        here = [row for row in rows if row["budget"] == budget]
        head = f"**{budget} of {first['steps']} steps computed.**"
        parts += [f"{head} {text}" if (text := steadiness(here)) else head, _numbers(here)]
    return parts


def _numbers(rows: Sequence[Row]) -> str:
    """A line per number of prompts: means with intervals, and the range of the choices."""
    known = ("trajectory, no refit", "trajectory", "paper", "fewer steps")
    methods = [m for m in known if any(row["method"] == m for row in rows)]
    found = {(row["prompts"], row["method"]): row for row in rows}
    head, body = ["prompts"], []
    for method in methods:
        head += [f"{method}, dB (95 %)"]
        head += [] if method in ("fewer steps", "trajectory") else ["choices"]
    for number in sorted({row["prompts"] for row in rows}):
        line = [str(number) if number else "none"]
        for method in methods:
            row = found.get((number, method))
            line.append("" if row is None else _spread(row))
            if method not in ("fewer steps", "trajectory"):
                line.append("" if row is None else _range(row["choices_db"]))
        body.append(line)
    return table(head, body)


def steadiness(rows: Sequence[Row]) -> str:
    """The effect of number and choice of prompts, for ours and the paper's."""
    found = []
    for method in ("trajectory, no refit", "paper"):
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["prompts"])
        if len(mine) < 2:
            continue
        few, many = mine[0], mine[-1]
        several = [row for row in mine if len(row["choices_db"]) > 1]
        text = (
            f"{method}: {few['psnr_db']:.1f} dB with {_prompts(few)}, {many['psnr_db']:.1f} dB "
            f"with {_prompts(many)}"
        )
        if several:
            wide = max(several, key=lambda row: max(row["choices_db"]) - min(row["choices_db"]))
            gap = max(wide["choices_db"]) - min(wide["choices_db"])
            text += f"; choices of equally many prompts differ by {gap:.1f} dB at most"
            text += f" (with {_prompts(wide)})"
        found.append(f"{text}.")
    return " ".join(text[0].upper() + text[1:] for text in found)


def _prompts(row: Row) -> str:
    return "1 prompt" if row["prompts"] == 1 else f"{row['prompts']} prompts"


def _spread(row: Row) -> str:
    return f"{row['psnr_db']:.1f} ({row['psnr_low']:.1f} to {row['psnr_high']:.1f})"


def _range(values: Sequence[float]) -> str:
    """The range of several means; of one there is none."""
    return "" if len(values) < 2 else f"{min(values):.1f} to {max(values):.1f}"


def curves_table(rows: Sequence[Row]) -> str:
    """Per model the plot and its correlations."""
    return sections(rows, _curves)


def _curves(rows: list[Row]) -> list[str]:
    (row,) = rows
    name, title = f"curves-{row['model']}.png", "Relative L1 change from step to step"
    pairs = {
        "residual of a prompt and its mean over prompts": "prompt_with_mean",
        "TeaCache's estimate and the residual": "estimate_with_residual",
        "TeaCache's estimate and the network's output": "estimate_with_output",
    }
    body = [
        [pair, f"{row[key]['mean']:.2f}", f"{row[key]['lowest']:.2f}"]
        for pair, key in pairs.items()
    ]
    spread = 100 * row["spread_over_prompts"]
    early = row["estimate_over_output_first_third"]
    late = row["estimate_over_output_last_third"]
    text = (
        f"{row['prompts']} held-out prompts, {row['steps']} steps; lines are means, bands hold "
        f"90 % of the prompts. The residual's change varies by {spread:.0f} % "
        "(standard deviation over prompts, mean over steps). TeaCache's estimate is "
        f"{early:.2f} times the change of the output in the first third of the steps and "
        f"{late:.2f} times in the last. {divergence(early, late)}"
    )
    head = ["correlation over steps", "mean over prompts", "lowest"]
    return [text, *image(name, f"{title}, {row['model']}"), table(head, body)]


def divergence(early: float, late: float) -> str:
    """When TeaCache's estimate is less accurate, from its ratio to the estimated change."""
    if abs(math.log(early)) < abs(math.log(late)):
        return "As in the paper's figure, it diverges late in the run."
    return "In the paper's figure it diverges late in the run; here it is less accurate early."


def errormaps_table(rows: Sequence[Row]) -> str:
    """Per model the image, its prompts and its numbers."""
    return sections(rows, _errormaps)


def _errormaps(rows: list[Row]) -> list[str]:
    (row,) = rows
    name = f"error-maps-{row['model']}.png"
    prompts = "; ".join(f"“{prompt}”" for prompt in row["prompts"])
    frames = f", {row['frames']} frames of each" if row["frames"] else ""
    text = (
        f"Held-out prompts{frames}, from left to right: {prompts}. Differences are "
        f"amplified {row['gain']:g} times."
    )
    body = [
        [
            one["method"],
            one["knob"] or "",
            f"{one['psnr_db']:.1f}",
            f"{255 * one['largest_difference']:.0f}",
        ]
        for one in row["methods"]
    ]
    head = ["method", "setting", "PSNR of these, dB", "largest difference, of 255"]
    title = f"Where methods differ from the full run, {row['model']}"
    return [text, *image(name, title), table(head, body)]


def overhead_table(rows: Sequence[Row]) -> str:
    """Per model the speed-up of the loop and the cost of a reused step."""
    return sections(rows, _overhead)


def _overhead(rows: list[Row]) -> list[str]:
    texts = [f"{rows[0]['steps']} steps, medians of {rows[0]['runs']} runs."]
    for threads in dict.fromkeys(row["threads"] for row in rows):
        found = [row for row in rows if row["threads"] == threads]
        texts.append(
            f"With {threads} {'thread' if threads == 1 else 'threads'} the full loop takes "
            f"{found[0]['full_seconds']:.2f} s, a computed step {found[0]['computed_step_ms']:.1f} "
            f"ms; a reused step at most {max(row['reused_step_percent'] for row in found):.2f} % "
            f"of that. {shortfall(found)}"
        )
    body = [
        [
            row["method"],
            str(row["threads"]),
            f"{row['compute_steps']} of {row['steps']}",
            f"{row['seconds']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['steps'] / row['compute_steps']:.2f}",
            f"{row['percent_of_ideal']:.1f}",
            f"{expected(row):.1f}",
            f"{row['reused_step_ms']:.2f}",
            f"{row['reused_step_percent']:.2f}",
            f"{row['cached_bytes'] / 1e3:.0f}" if "cached_bytes" in row else "",
        ]
        for row in rows
    ]
    head = ["method", "threads", "computed", "loop, s", "speed-up", "ideal", "% of ideal"]
    head += ["% by step costs", "reused step, ms", "% of a computed step", "cached, kB"]
    return [" ".join(texts), table(head, body)]


def expected(row: Row) -> float:
    """The percentage of the ideal speed-up that follows from the costs of both kinds of steps.

    Example:
        >>> expected({"steps": 30, "compute_steps": 10, "reused_step_percent": 5.0})
        90.9090909090909
    """
    computed, reused = row["compute_steps"], row["steps"] - row["compute_steps"]
    cost: float = computed + reused * row["reused_step_percent"] / 100
    return 100 * computed / cost


def shortfall(rows: Sequence[Row]) -> str:
    """The rows below the target of the loop."""
    low = [row for row in rows if row["percent_of_ideal"] < IDEAL]
    if not low:
        return f"All reach {IDEAL:g} % of the ideal."
    names = ", ".join(
        f"{row['method']} with {row['compute_steps']} computed steps "
        f"({row['percent_of_ideal']:.1f} %)"
        for row in low
    )
    return f"Below {IDEAL:g} % of the ideal: {names}."


def fewsteps_table(rows: Sequence[Row]) -> str:
    """Per model the gain of a policy for runs of a few steps."""
    return sections(rows, _fewsteps, "###")


def _fewsteps(rows: list[Row]) -> list[str]:
    body = [
        [
            str(row["steps"]),
            str(row["compute_steps"]),
            f"{row['speedup']:.2f}",
            *(f"{row[key]:.1f}" for key in ("psnr_db", "plain_db", "fewer_db")),
            # Older results files have "not worth it".
            (row["verdict"] or "recommended").replace("not worth it", "not recommended"),
        ]
        for row in rows
    ]
    head = ["steps", "computed", "speed-up", "policy, dB", "plain reuse, dB", "fewer steps, dB"]
    return [f"{rows[0]['prompts']} held-out prompts.", table([*head, "verdict"], body)]
