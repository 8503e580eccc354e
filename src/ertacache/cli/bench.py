"""``ertacache bench``: every method on a model, at several budgets, into one results file.

Only the command: ``ertacache.bench`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from ertacache.bench.methods import IDENTIFIERS, parse_methods
from ertacache.cli.console import Stages, print_line, print_table
from ertacache.cli.group import Interrupted, command_line, processes_of
from ertacache.cli.loading import choose_prompts, open_model, read_prompts, readable_failures
from ertacache.cli.options import BatchSize, CallOptions, Force, Model, PromptsFile, Seed
from ertacache.cli.writing import check_name

if TYPE_CHECKING:
    from ertacache.bench.results import BenchRow, Interval
    from ertacache.formats.profile import ProfiledPrompt

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = (
    "ertacache bench emoji-flux -o bench.json",
    "ertacache bench emoji-flux --methods trajectory,teacache,fewer-steps --budgets 2 --limit 16 "
    "-o quick.json",
    "ertacache bench ./my-pipeline --prompts mine.txt --heldout others.txt --steps 50 -o mine.json",
)
CALIBRATION_PROMPTS, HELDOUT_PROMPTS = 32, 64

_LISTED = fill(", ".join(IDENTIFIERS), width=44, break_on_hyphens=False)
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="NAME,NAME,...",
        help=f"All by default, or some of:\n\n\b\n{_LISTED}",  # \b keeps the lines
    ),
]

Budgets = Annotated[
    str | None,
    typer.Option(
        "--budgets",
        metavar="NUMBER,NUMBER,...",
        help="Speed-ups to compare at; by default 1.5,2,3,4,5, up to half as many as steps.",
    ),
]


def bench(
    context: typer.Context,
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The results, as JSON.")
    ],
    *,
    methods: Methods = None,
    budgets: Budgets = None,
    prompts: PromptsFile = None,
    heldout: Annotated[
        Path | None,
        typer.Option("--heldout", metavar="FILE", help="Held-out prompts, one per line."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="Held-out prompts to evaluate on.")
    ] = HELDOUT_PROMPTS,
    calibration: Annotated[
        int, typer.Option("--calibration", min=2, metavar="N", help="Calibration prompts.")
    ] = CALIBRATION_PROMPTS,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FOLDER", help="Training images, to compute FID."),
    ] = None,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    force: Force = False,
    call: CallOptions,
) -> None:
    """Compare all methods on held-out prompts.

    Every measurement is saved as it is made, in a journal beside the results; the same command
    continues an interrupted run.
    """
    check_name(output, ".json")
    wanted = [] if methods is None else parse_methods(methods)
    speedups = None if budgets is None else _numbers(budgets)
    fitted = choose_prompts(model, prompts, limit=calibration)
    evaluated = _heldout(model, heldout)[:limit]
    processes = processes_of(context)
    pipe, arguments = open_model(model, call, processes=processes)
    if "num_inference_steps" not in arguments:
        raise ValueError("give the number of steps of a full run with --steps")
    from ertacache.bench.bench import Bench, default_budgets
    from ertacache.bench.workload import Workload
    from ertacache.calibration.session import Session

    runs = _number(fitted, evaluated, seed)
    with readable_failures(call), Stages() as stage:
        session = Session(pipe, arguments, batch_size=batch_size, stage=stage, processes=processes)
        for argument in session.varied:
            raise ValueError(f"bench takes one value of {argument}, not a list")
        name = model if call.lora is None else f"{model} with {call.lora}"
        work, command = Workload(name, session, *runs), command_line(context)
        chosen = default_budgets(work.steps) if speedups is None else speedups
        measured = Bench(work, output, chosen, wanted, command, reference, force)
        with _keeping_journal(measured.journal_path):
            rows = measured.run(stage)
    _print_rows(rows)
    print_line(f"Results in {output}")


@contextmanager
def _keeping_journal(path: Path) -> Iterator[None]:
    """Report, if the benchmark is interrupted, where its measurements are."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not path.exists():
            raise
        left = f"the measurements so far are in {path}; the same command continues from there"
        raise Interrupted(left) from error


def _heldout(model: str, path: Path | None) -> list[str]:
    """The held-out prompts: those of the file, or of the bundled model."""
    from ertacache.models.zoo import MODELS, load_prompts

    if path is not None:
        return read_prompts(path)
    if model in MODELS:
        return load_prompts(model, "heldout")
    raise ValueError(f"{model!r} comes with no held-out prompts: give a file with --heldout")


def _number(
    fitted: Sequence[str], evaluated: Sequence[str], seed: int
) -> tuple[list[ProfiledPrompt], list[ProfiledPrompt]]:
    """Calibration and held-out prompts with seeds; they share no prompt and no seed."""
    from ertacache.calibration.session import HELDOUT_SEED, number_runs

    shared = set(fitted) & set(evaluated)
    if shared:
        raise ValueError(f"a held-out prompt is also a calibration prompt: {min(shared)!r}")
    return number_runs(fitted, seed), number_runs(evaluated, seed + HELDOUT_SEED)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as cause:
        raise ValueError(f"--budgets takes numbers separated by commas, got {text!r}") from cause
    if not all(1 < number < math.inf for number in found):
        raise ValueError(f"--budgets are speed-ups, finite and greater than 1, got {text!r}")
    return tuple(dict.fromkeys(found))


def _print_rows(rows: Sequence[BenchRow]) -> None:
    """One table per budget, the closest to the full run first."""
    from ertacache.bench.results import FULL
    from ertacache.report.tables import best_first

    for budget in sorted({row.budget for row in rows if row.method != FULL}):
        chosen = best_first([row for row in rows if row.budget == budget])
        print_table(
            f"Budget {budget:g}x",
            ["", "FLOPs", "speed-up", "PSNR", "p10", "SSIM", "LPIPS", "cache"],
            [_cells(row) for row in chosen],
        )


def _cells(row: BenchRow) -> list[str]:
    if row.why_not is not None:
        return [row.method, "not applicable", "", "", "", "", "", ""]
    return [
        row.method,
        f"{row.flops_ratio or 0.0:.3f}",
        _cell(row.speedup, "{:.2f}x"),
        _cell(row.psnr, "{:.2f} dB" if row.keeps_budget else "({:.2f} dB)"),
        "" if row.psnr_tenth is None else f"{row.psnr_tenth:.2f} dB",
        _cell(row.ssim, "{:.4f}"),
        _cell(row.lpips, "{:.4f}"),
        f"{(row.cached_bytes or 0) / 1e3:.0f} kB",
    ]


def _cell(quantity: Interval | None, form: str) -> str:
    return "not available" if quantity is None else form.format(quantity.value)
