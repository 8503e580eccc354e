"""What a calibration costs: network evaluations of every stage, in full runs.

Counts, and times nothing: the numbers are the same on every machine. Writes its rows into
``results/cost.json``, in place of older rows of the same models.

    python benchmarks/cost.py                           # every bundled model
    python benchmarks/cost.py emoji-flux --calibration 32
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rows import RESULTS, ModelParser, Row, replace_rows, show_progress

from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import refit_budget
from ertacache.calibration.session import Session, number_runs
from ertacache.calibration.trial import measure_fits
from ertacache.core.plans import steps_for_speedup
from ertacache.integration.solve import profile_of
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUPS = (2.0, 3.0)  # those of calibrate
EMPTY = "Not measured yet."


def count(name: str, options: argparse.Namespace) -> Row:
    """The row of a model."""
    session = Session(
        load_pipeline(name),
        MODELS[name].call_arguments,
        batch_size=options.batch_size,
        stage=lambda stage: show_progress(f"{name}: {stage}"),
    )
    runs = number_runs(load_prompts(name, "calibration")[: options.calibration])
    known = profile_runs(session, runs, keep=runs)
    known = measure_fits(session, known, runs)
    steps = profile_of(known).num_steps
    row: Row = {
        "model": name,
        "prompts": len(runs),
        "steps": steps,
        "profile": session.evaluations.profile,
        "trial": session.evaluations.trial,
    }
    for speedup in SPEEDUPS:
        before = session.evaluations.refit
        refit_budget(session, known, session.reference(runs), steps_for_speedup(steps, speedup))
        row[f"refit_{speedup:g}x"] = session.evaluations.refit - before
    return row


def cost_table(rows: Sequence[Row]) -> str:
    """Full runs for every prompt, by stage."""
    if not rows:
        return EMPTY
    stages = ["profile", "trial", *(f"refit_{speedup:g}x" for speedup in SPEEDUPS)]
    head = ["full runs for each prompt", *(name.replace("_", " at ") for name in stages), "all"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for row in rows:
        found = [row[stage] / row["prompts"] / row["steps"] for stage in stages]
        cells = [f"{value:.1f}" for value in [*found, sum(found)]]
        lines.append(f"| `{row['model']}`, {row['prompts']} prompts | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Count for models, one after the other, and write their rows."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=8, help="calibration prompts")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts per call")
    parser.add_argument("--results", type=Path, default=RESULTS / "cost.json")
    options = parser.parse(arguments)
    for name in options.models:
        replace_rows(options.results, name, [row := count(name, options)])
        print(row, flush=True)


if __name__ == "__main__":
    main()
