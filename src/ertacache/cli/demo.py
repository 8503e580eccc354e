"""``ertacache demo``: calibrate the bundled image model, then generate with and without.

A door only: profiling, solving, refitting and measuring are done elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli.console import Stages, decibels, say, say_table
from ertacache.cli.options import CallOptions

if TYPE_CHECKING:
    from torch import Tensor

    from ertacache.calibration.validation import Way
    from ertacache.formats.policy import Policy

__all__ = ["demo"]

MODEL = "emoji-flux"
SPEEDUPS = (2.0, 3.0)
SHOWN = 8


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path(
        "ertacache-demo"
    ),
    prompts: Annotated[int, typer.Option(min=2, max=64, help="Calibration prompts.")] = 16,
    heldout: Annotated[int, typer.Option(min=1, max=128, help="Held-out prompts.")] = 16,
) -> None:
    """Calibrate the bundled model and generate held-out prompts with and without, at 2x and 3x.

    Example: ertacache demo --output my-demo
    """
    from ertacache.cli.loading import open_model

    say(f"Calibrating {MODEL} on {prompts} prompts, then generating {heldout} held-out ones.")
    output.mkdir(parents=True, exist_ok=True)
    pipe, call = open_model(MODEL, CallOptions(), dtype="float32", device="cpu")
    with Stages() as stage:
        policies = _calibrate(pipe, prompts, call, stage)
        ways, pictures = _measure(pipe, policies, heldout, call, stage)
    for name, policy in policies.items():
        policy.save(output / f"{MODEL}-{name.split()[-1]}.safetensors")
    _say_results(ways, pictures)
    path = output / "comparison.png"
    _draw(ways, pictures, path)
    say(f"The picture: {path}")
    say(f"The policies: {output}/{MODEL}-2x.safetensors and -3x.safetensors")


def _calibrate(pipe: Any, count: int, call: dict[str, Any], stage: Stages) -> dict[str, Policy]:
    from ertacache.calibration import profile, solve
    from ertacache.calibration.refining import REFINE_PROMPTS, collect_reference, refine
    from ertacache.models import load_prompts

    kept: list[Any] = []
    known = profile(
        pipe,
        load_prompts(MODEL, "calibration")[:count],
        batch_size=8,
        progress=stage("profile"),
        observe=lambda runs, run: kept.append((runs, run)),
        **call,
    )
    runs = known.prompts[:REFINE_PROMPTS]
    reference = collect_reference(pipe, runs, kept, batch_size=8, call=call)
    policies = {}
    for speedup in SPEEDUPS:
        progress = stage(f"solve {speedup:g}x")
        solved = solve(known, speedup=speedup)
        policies[f"ertacache {speedup:g}x"] = refine(
            pipe, solved, known, reference=reference, call=call, progress=progress
        )
    return policies


def _measure(
    pipe: Any, policies: dict[str, Policy], count: int, call: dict[str, Any], stage: Stages
) -> tuple[list[Way], list[Tensor]]:
    import torch

    from ertacache.calibration.procedure import HELDOUT_SEED
    from ertacache.calibration.profiling import number_runs
    from ertacache.calibration.validation import measure, ways_of
    from ertacache.models import load_prompts

    ways = ways_of(policies)
    pictures: list[list[Tensor]] = [[] for _ in ways]
    measure(
        pipe,
        ways,
        number_runs(load_prompts(MODEL, "heldout")[:count], HELDOUT_SEED),
        batch_size=4,
        progress=stage("generate"),
        call=call,
        observe=lambda way, _, result: pictures[ways.index(way)].append(result),
    )
    return ways, [torch.cat(batches) for batches in pictures]


def _say_results(ways: list[Way], pictures: list[Tensor]) -> None:
    from ertacache.metrics import ssim

    full, rows = median(ways[0].seconds), []
    for way, shown in zip(ways, pictures, strict=True):
        seconds = median(way.seconds)
        row = [way.name, str(way.computed_steps), f"{seconds:.2f}", f"{full / seconds:.2f}x"]
        quality = ssim(shown, pictures[0]).mean().item()
        close = [decibels(sum(way.decibels) / len(way.decibels)), f"{quality:.4f}"]
        rows.append([*row, *(close if way is not ways[0] else ["", ""])])
    title = f"{len(pictures[0])} held-out prompts, against the full run"
    columns = ["", "computed steps", "seconds a batch", "speed-up", "PSNR", "SSIM"]
    say_table(title, columns, rows)


def _draw(ways: list[Way], pictures: list[Tensor], path: Path) -> None:
    from ertacache.pictures import difference, grid

    truth = pictures[0][:SHOWN]
    rows = [(f"full run, {ways[0].computed_steps} steps", truth)]
    for way, shown in zip(ways, pictures, strict=True):
        if way.name.startswith("ertacache"):
            rows.append((f"{way.name}, {way.computed_steps} steps computed", shown[:SHOWN]))
            rows.append(("difference, 8 times", difference(shown[:SHOWN], truth)))
    grid(rows, scale=2).save(path)
