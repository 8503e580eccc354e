"""Tables of results/schedules.json, predictions.json and groups.json, with a sentence on each."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from rows import Row

__all__ = ["groups_table", "predictions_table", "schedules_table"]

WITHIN = 1.5  # factor of a prediction that can be relied on


def schedules_table(rows: list[Row]) -> str:
    """One table per model, and where the resampled profile stands against the others."""
    if not rows:
        return "Not measured yet."
    parts = [_schedules_summary(rows)]
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        found = list(group)
        lines = [
            f"### {model}",
            "",
            f"{found[0]['prompts']} held-out prompts.",
            "",
            "| setting | computed | from the profile of other runs, dB (95 %) | from its own, dB | "
            "its own, refitted, dB | fewer steps, dB |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for row in found:
            low, high = row["resampled_low"], row["resampled_high"]
            lines.append(
                f"| {_setting(row)} | {row['compute_steps']} of {row['steps']} | "
                f"{row['resampled_db']:.1f} ({low:.1f} to {high:.1f}) | {row['own_db']:.1f} | "
                f"{row['refit_db']:.1f} | {row['fewer_db']:.1f} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _setting(row: Row) -> str:
    words = {"steps": "{} steps", "size": "{}", "scheduler": "`{}`", "strength": "strength {}"}
    return words.get(row["varied"], "{}").format(row["value"])


def _schedules_summary(rows: list[Row]) -> str:
    """Medians, and the rows that are behind."""
    lead = [row["resampled_db"] - row["fewer_db"] for row in rows]
    half = [
        x for row, x in zip(rows, lead, strict=True) if 2 * row["compute_steps"] >= row["steps"] - 1
    ]
    lost = [row["own_db"] - row["resampled_db"] for row in rows]
    behind = [
        f"{row['model']}, {_setting(row)}, {row['compute_steps']} of {row['steps']}"
        for row, x in zip(rows, lead, strict=True)
        if x <= 0
    ]
    where = "in every row" if not behind else f"in all rows but: {'; '.join(behind)}"
    return (
        f"Ahead of fewer steps {where}. In the median ahead by {median(lead):.1f} dB, with half of "
        f"the steps computed by {median(half):.1f} dB; {median(lost):.1f} dB below the plan from "
        f"the setting's own profile."
    )


def predictions_table(rows: list[Row]) -> str:
    """Predicted and measured errors of plans that were not refitted."""
    if not rows:
        return "Not measured yet."
    worst = max(max(row["ratio"], 1 / row["ratio"]) for row in rows)
    outside = sum(not 1 / WITHIN <= row["ratio"] <= WITHIN for row in rows)
    held = "every row" if not outside else f"all rows but {outside}"
    lines = [
        f"Within a factor of {WITHIN} in {held}; the worst is off by a factor of {worst:.2f}.",
        "",
        "| model | computed | predicted error | measured error | measured / predicted |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| `{row['model']}` | {row['compute_steps']} of {row['steps']} | "
        f"{row['predicted_rmse']:.4f} | {row['measured_rmse']:.4f} | {row['ratio']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def groups_table(rows: list[Row]) -> str:
    """One table per model: one group, groups, and the second history besides."""
    if not rows:
        return "Not measured yet."
    own, other = ([r for r in rows if r["calibrated"] == kind] for kind in (True, False))
    parts = [
        f"Against one group, what calibration chooses gains {_range(own)} at the calibrated size "
        f"and {_range(other)} at other sizes, in the mean over prompts."
    ]
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        found = list(group)
        lines = [
            f"## {model}",
            "",
            f"{found[0]['prompts']} held-out prompts; in brackets what nine of ten exceed.",
            "",
            "| size | computed | one group, dB | groups, dB | with the second history, dB | "
            "gain, dB (95 %) | fewer steps, dB |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        for row in found:
            cells = [
                f"{row[f'{kind}_db']:.1f} ({row[f'{kind}_p10']:.1f})"
                for kind in ("one", "groups", "chosen", "fewer")
            ]
            gain = f"{row['gain_db']:+.1f} ({row['gain_low']:+.1f} to {row['gain_high']:+.1f})"
            lines.append(
                f"| {row['height']} x {row['width']} | {row['compute_steps']} of {row['steps']} | "
                f"{' | '.join(cells[:3])} | {gain} | {cells[3]} |"
            )
        plans = [
            f"With {row['compute_steps']} computed steps: {row['chosen_plan']}."
            for row in found
            if row["calibrated"]
        ]
        parts += ["\n".join(lines), " ".join(plans)]
    return "\n\n".join(parts)


def _range(rows: list[Row]) -> str:
    gains = [row["gain_db"] for row in rows]
    return f"{min(gains):+.1f} to {max(gains):+.1f} dB"
