"""``ertacache bench``: every method on a model, at several budgets, into one results file.

Knows how the command line names things, not how anything is measured.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli import options as opt
from ertacache.cli.console import Stages, say, say_table
from ertacache.cli.loading import choose_prompts, open_model, read_prompts, running

if TYPE_CHECKING:
    from ertacache.formats.profile import ProfiledPrompt

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = (
    "ertacache bench emoji-flux -o bench.json",
    'ertacache bench emoji-flux --methods "trajectory,TeaCache,fewer steps" --budgets 2 '
    "--limit 16 -o quick.json",
    "ertacache bench ./my-pipeline --prompts mine.txt --heldout others.txt --steps 50 -o mine.json",
)
CALIBRATION_PROMPTS, HELDOUT_PROMPTS = 32, 64


def bench(
    model: opt.Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The results, as JSON.")
    ],
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="LIST", help="Methods, with commas; all by default."),
    ] = None,
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="LIST", help="Speed-ups, with commas.")
    ] = "1.5,2,3",
    prompts: opt.PromptsFile = None,
    heldout: Annotated[
        Path | None,
        typer.Option("--heldout", metavar="FILE", help="Prompts to judge on, one per line."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="Held-out prompts to judge on.")
    ] = HELDOUT_PROMPTS,
    calibration: Annotated[
        int, typer.Option("--calibration", min=2, metavar="N", help="Prompts to learn from.")
    ] = CALIBRATION_PROMPTS,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FOLDER", help="Training pictures, to compute FID."),
    ] = None,
    seed: opt.Seed = 0,
    batch_size: opt.BatchSize = 8,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    height: opt.Height = None,
    width: opt.Width = None,
    frames: opt.Frames = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = None,
    arguments: opt.Arguments = None,
) -> None:
    """Compare all methods on held-out prompts; started again, it goes on where it stopped."""
    from ertacache.bench import Bench, Workload

    wanted = [name.strip() for name in methods.split(",")] if methods else []
    given = opt.CallOptions(steps, guidance, height, width, frames, tuple(arguments or ()))
    learnt = choose_prompts(model, prompts, limit=calibration)
    judged = _heldout(model, heldout)[:limit]
    pipe, call = open_model(model, given, dtype=dtype, device=device)
    if "num_inference_steps" not in call:
        raise ValueError("say how many steps a full run has: --steps")
    work = Workload(model, pipe, call, *_number(learnt, judged, seed), batch_size)
    command = shlex.join(["ertacache", *sys.argv[1:]])
    comparison = Bench(work, output, _numbers(budgets), wanted, command, reference)
    with running(given), Stages() as stage:
        rows = comparison.run(stage)
    _say_rows(rows)
    say(f"Results in {output}")


def _heldout(model: str, path: Path | None) -> list[str]:
    """The prompts to judge on: those of the file, or the ones that come with the model."""
    from ertacache.models.zoo import MODELS, load_prompts

    if path is not None:
        return read_prompts(path)
    if model in MODELS:
        return load_prompts(model, "heldout")
    raise ValueError(f"{model!r} comes with no held-out prompts: give a file with --heldout")


def _number(
    learnt: Sequence[str], judged: Sequence[str], seed: int
) -> tuple[list[ProfiledPrompt], list[ProfiledPrompt]]:
    """Prompts with seeds; no prompt and no seed on both sides."""
    from ertacache.calibration.procedure import HELDOUT_SEED
    from ertacache.calibration.profiling import number_runs

    both = set(learnt) & set(judged)
    if both:
        raise ValueError(f"a prompt to judge on is also one to learn from: {min(both)!r}")
    return number_runs(learnt, seed), number_runs(judged, seed + HELDOUT_SEED)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as cause:
        raise ValueError(f"--budgets takes numbers with commas, got {text!r}") from cause


def _say_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One table per budget, the closest to the full run first."""
    for budget in sorted({row["budget"] for row in rows if row["method"] != "full"}):
        chosen = [row for row in rows if row["budget"] == budget]
        chosen.sort(key=lambda row: -(row["psnr_db"] or 0.0))
        say_table(
            f"Turned to {budget:g}x",
            ["", "FLOPs", "speed-up", "PSNR", "SSIM", "LPIPS", "cache"],
            [_cells(row) for row in chosen],
        )


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["why_not"] is not None:
        return [row["method"], "not applicable", "", "", "", "", ""]
    lpips = "not available" if row["lpips"] is None else f"{row['lpips']:.4f}"
    return [
        row["method"],
        f"{row['flops_ratio']:.3f}",
        f"{row['speedup']:.2f}x",
        f"{row['psnr_db']:.2f} dB",
        f"{row['ssim']:.4f}",
        lpips,
        f"{row['cached_bytes'] / 1e3:.0f} kB",
    ]
