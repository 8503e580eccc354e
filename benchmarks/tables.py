"""Write the tables of results/ into the pages that show them.

A table stands between two comments, ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Run it after
the benchmarks, ``python -m tests.compatibility`` and ``python -m tests.comfyui.live.measure``; the
tests check that the pages are up to date.

    python benchmarks/tables.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

from benchtables import front_table, model_table, read_bench, same_table, summary_table
from comfytables import comfyui_table
from cost import cost_table
from figuretables import (
    curves_table,
    errormaps_table,
    fewsteps_table,
    overhead_table,
    sensitivity_table,
)
from newcomer import newcomer_table
from rows import RESULTS, ROOT, Row, read_rows
from scheduletables import groups_table, predictions_table, schedules_table

from ertacache.formats.files import write_whole
from ertacache.models import MODELS

PAGES = {
    "front": "README.md",
    "overview": "docs/fidelity.md",
    "fidelity": "docs/fidelity-methods.md",
    "predictions": "docs/fidelity.md",
    "groups": "docs/groups.md",
    "schedules": "docs/transfer.md",
    "transfer": "docs/transfer.md",
    "fewsteps": "docs/transfer.md",
    "check": "docs/check.md",
    "cost": "docs/calibrate.md",
    "same": "docs/benchmark.md",
    "summary": "docs/benchmark.md",
    **{f"bench-{model}": f"docs/benchmark-{model}.md" for model in MODELS},
    "sensitivity": "docs/figures-prompts.md",
    "curves": "docs/figures-steps.md",
    "errormaps": "docs/figures-errors.md",
    "overhead": "docs/overhead.md",
    "compatibility": "docs/compatibility.md",
    "comfyui": "comfyui/README.md",
    "scale": "docs/scale.md",
    "newcomer": "docs/start.md",
}
BUSY = 3.0  # load before a measurement; what was measured last counts for a minute
SOURCES = {"overview": "fidelity"}  # tables made of the rows of another one
# Methods of the overview, and their names there.
OVERVIEW = {
    "trajectory": "ours",
    "fewer steps": "fewer steps",
    "plain reuse": "plain reuse",
    "paper (network-calibrated)": "paper",
    "paper (network-calibrated), no timesteps": "paper, no timesteps",
}


def fidelity_table(rows: list[Row]) -> str:
    """One table per model: a row per method and number of computed steps."""
    parts = []
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        found = list(group)
        first = found[0]
        lines = [
            f"## {model}",
            "",
            f"{first['steps']} steps, {first['prompts']} held-out prompts.",
            "",
            "| method | computed steps | PSNR, dB (95 %) | SSIM | speed-up |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {row['method']} | {row['compute_steps']} | {spread(row)} | {row['ssim']:.4f} | "
            f"{row['speedup']:.2f} |"
            for row in found
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "Not measured yet."


def overview_table(rows: list[Row]) -> str:
    """A line per model and budget: ours and the alternatives."""
    head = ["model", "computed", *OVERVIEW.values()]
    lines = [f"| {' | '.join(head)} |", "|---|--:|" + "--:|" * len(OVERVIEW)]
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        found = list(group)
        budgets = {row["compute_steps"] for row in found if row["method"] == "trajectory"}
        for budget in sorted(budgets, reverse=True):
            cells = [spread(row) if (row := nearest(found, m, budget)) else "" for m in OVERVIEW]
            steps = f"{budget} of {found[0]['steps']}"
            lines.append(f"| `{model}` | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def nearest(rows: list[Row], method: str, budget: int) -> Row | None:
    """The row of a method with the most computed steps within a budget."""
    within = [row for row in rows if row["method"] == method and row["compute_steps"] <= budget]
    return max(within, key=lambda row: row["compute_steps"], default=None)


def transfer_table(rows: list[Row]) -> str:
    """One table per model, and a sentence on where the policy is ahead."""
    parts = []
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        found = list(group)
        home = next(row for row in found if row["calibrated"])
        listed = any("list_db" in row for row in found)
        lines = [
            f"### {model}",
            "",
            f"Calibrated at {place(home)}; {home['compute_steps']} of {home['steps']} steps "
            f"computed, {home['prompts']} held-out prompts. {ahead(found)}",
            "",
            "| varied | guidance | size | batch | policy, dB (95 %) |"
            f"{' calibrated over a list, dB |' if listed else ''} fewer steps, dB | ahead |",
            f"|---|--:|--:|--:|--:|{'--:|' if listed else ''}--:|---|",
            *(transfer_line(row, listed=listed) for row in found),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "Not measured yet."


def transfer_line(row: Row, *, listed: bool) -> str:
    """One line of the table, with the policy of a list of guidance values if there is one."""
    guidance = "none" if row["guidance"] is None else f"{row['guidance']:g}"
    where = f"| {row['varied']} | {guidance} | {row['height']} x {row['width']} | "
    where += f"{row['batch_size']} | "
    more = (f" {spread(row, 'list')} |" if "list_db" in row else " |") if listed else ""
    if "refused" in row:
        return f"{where}refused |{more} | no |"
    verdict = "yes" if row["beats_fewer_steps"] else "no"
    return f"{where}{spread(row)} |{more} {spread(row, 'fewer')} | {verdict} |"


def ahead(rows: list[Row]) -> str:
    """Where the policy is ahead of fewer steps, in a sentence."""
    behind = [row for row in rows if not row["beats_fewer_steps"]]
    if not behind:
        return "The policy is ahead of fewer steps at every setting."
    places = "; ".join(dict.fromkeys(map(place, behind)))
    return f"The policy is ahead of fewer steps everywhere but at {places}."


def place(row: Row) -> str:
    """A setting in words."""
    guidance = "no guidance" if row["guidance"] is None else f"guidance {row['guidance']:g}"
    return f"{guidance}, {row['height']} x {row['width']}, batch {row['batch_size']}"


def check_table(rows: list[Row]) -> str:
    """One table per model: what a policy lost with every change, and a sentence on the losses."""
    parts = []
    for model, group in groupby(rows, key=lambda row: str(row["model"])):
        found = list(group)
        lines = [
            f"### {model}",
            "",
            f"{found[0]['prompts']} held-out prompts. {losses(found)}",
            "",
            "| changed | change, dB | computed steps | in the file, dB | measured, dB | lost, dB |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for row in found:
            moved = "" if row["change_db"] is None else f"{row['change_db']:.1f}"
            lines.append(
                f"| {row['change']} | {moved} | {row['computed_steps']} of {row['num_steps']} | "
                f"{row['expected_psnr']:.1f} | {row['psnr']:.1f} | {row['lost_db']:.1f} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "Not measured yet."


def losses(rows: list[Row]) -> str:
    """With which changes the check fails, in a sentence."""
    failed = [f"{row['change']} at {row['computed_steps']} steps" for row in rows if row["failed"]]
    if not failed:
        return "No change costs more than 6 dB."
    return f"More than 6 dB are lost with {', '.join(failed)}: there `check` ends with exit code 3."


def compatibility_table(rows: list[Row]) -> str:
    """The pipelines that pass every check, then those that are refused, each with its message."""
    green = [row for row in rows if "refused" not in row]
    refused = [row for row in rows if "refused" in row]
    lines = [
        f"{len({row['pipeline'] for row in green})} pipelines in {len(green)} settings.",
        "",
        "| model | pipeline | network | scheduler | calls, full run | with the policy |",
        "|---|---|---|---|--:|--:|",
        *(
            f"| {row['model']} | `{row['pipeline']}` | {networks(row)} | "
            f"{row['scheduler']} | {calls(row['calls'])} | {calls(row['calls_attached'])} |"
            for row in green
        ),
        "",
        "Refused:",
        "",
        "| model | pipeline | scheduler | error message |",
        "|---|---|---|---|",
        *(
            f"| {row['model']} | `{row['pipeline']}` | {row['scheduler']} | {row['refused']} |"
            for row in refused
        ),
    ]
    return "\n".join(lines) if rows else "Not measured yet."


def networks(row: Row) -> str:
    """The classes of a pipeline's networks, each once."""
    return ", ".join(dict.fromkeys(row["networks"].values()))


def calls(counts: dict[str, int]) -> str:
    """The calls of each network."""
    return " + ".join(map(str, counts.values()))


def spread(row: Row, name: str = "psnr") -> str:
    """A mean and its interval."""
    return f"{row[f'{name}_db']:.1f} ({row[f'{name}_low']:.1f} to {row[f'{name}_high']:.1f})"


def scale_table(rows: list[Row]) -> str:
    """Seconds by number of processes."""
    if not rows:
        return "Not measured yet."
    first, same = rows[0], len({row["policy_sha256"] for row in rows}) == 1
    busy = max(row["load_before"] for row in rows)
    lines = [
        f"`{first['model']}`, {first['prompts']} prompts, {first['steps']} steps, {first['cores']} "
        f"core{'' if first['cores'] == 1 else 's'}, one thread per process; "
        f"the files are {'equal to the bit' if same else 'DIFFERENT'}.",
        "",
        "| processes | profile, s | refit at 2x, s |",
        "|--:|--:|--:|",
    ]
    lines += [
        f"| {row['processes']} | {row['profile_seconds']:.1f} | {row['refit_seconds']:.1f} |"
        for row in rows
    ]
    if busy > BUSY:
        lines += ["", f"The machine was busy (load {busy:g}): these times say little."]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Any], str]] = {
    "front": front_table,
    "overview": overview_table,
    "summary": summary_table,
    "fidelity": fidelity_table,
    "predictions": predictions_table,
    "groups": groups_table,
    "schedules": schedules_table,
    "transfer": transfer_table,
    "fewsteps": fewsteps_table,
    "check": check_table,
    "cost": cost_table,
    "same": same_table,
    **{f"bench-{model}": model_table for model in MODELS},
    "sensitivity": sensitivity_table,
    "curves": curves_table,
    "errormaps": errormaps_table,
    "overhead": overhead_table,
    "compatibility": compatibility_table,
    "comfyui": comfyui_table,
    "scale": scale_table,
    "newcomer": newcomer_table,
}


def rows_of(name: str) -> Any:
    """The rows of a table, as far as they were measured."""
    if name in ("front", "same", "summary"):
        return read_bench()
    if name.startswith("bench-"):
        return [row for row in read_bench() if f"bench-{row.model}" == name]
    return read_rows(RESULTS / f"{SOURCES.get(name, name)}.json")


def fill(name: str, page: str, rows: Any) -> str:
    """A page with its table replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"the page must have exactly one place for the table {name!r}")
    table = f"{begin}\n\n{TABLES[name](rows)}\n\n{end}"
    return pattern.sub(lambda _: table, page)


def main(arguments: list[str] | None = None) -> None:
    """Rewrite all pages."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(arguments)
    for name, page in PAGES.items():
        path = ROOT / page
        write_whole(path, fill(name, path.read_text(), rows_of(name)))
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
