"""``ertacache demo``: calibrate the bundled image model, then generate with and without a policy.

Only the command: profiling, solving, refitting and measuring are done by ``calibration``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli.console import Stages, print_line, print_table
from ertacache.cli.options import CallOptions, Force, Steps
from ertacache.cli.output import JsonFile
from ertacache.cli.writing import check_json, open_output, write_image, write_json
from ertacache.formats.text import decibels

if TYPE_CHECKING:
    from torch import Tensor

    from ertacache.calibration.session import Session
    from ertacache.calibration.validate import Variant
    from ertacache.formats.fitted import FittedPlan
    from ertacache.formats.policy import Policy

__all__ = ["EXAMPLES", "demo"]

EXAMPLES = ("ertacache demo --output my-demo",)
MODEL = "emoji-flux"
SPEEDUPS = (2.0, 3.0)
SHOWN = 8


def demo(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.")
    ] = Path("ertacache-demo"),
    prompts: Annotated[
        int, typer.Option(metavar="N", min=2, max=64, help="Calibration prompts.")
    ] = 8,
    heldout: Annotated[
        int, typer.Option(metavar="N", min=1, max=128, help="Held-out prompts.")
    ] = 16,
    steps: Steps = None,
    force: Force = False,
    json: JsonFile = None,
) -> None:
    """Calibrate a bundled model and compare with its full run.

    Held-out prompts are generated in full, and at 2x and 3x.
    """
    from ertacache.calibration.session import Session
    from ertacache.cli.loading import open_model
    from ertacache.core.plans import steps_for_speedup

    check_json(json)
    pipe, arguments = open_model(MODEL, CallOptions(steps=steps, device="cpu"))
    steps_for_speedup(arguments["num_inference_steps"], max(SPEEDUPS))  # raises for few steps
    print_line(
        f"Calibrating {MODEL} on {prompts} prompts, then generating {heldout} held-out ones."
    )
    output.mkdir(parents=True, exist_ok=True)
    file = open_output(context, output / f"{MODEL}.safetensors", force=force)
    if not _repeats(file.old, prompts, arguments["num_inference_steps"]):
        file.check(None)  # before any work
    with Stages() as stage:
        policy, plans = _calibrate(pipe, prompts, arguments, stage)
        session = Session(pipe, arguments, batch_size=4, stage=stage)
        variants, images = _measure(session, policy, plans, heldout)
    rows = _results(variants, images)
    _print_results(rows, heldout)
    file.save(replace(policy, plans=tuple(plans.values())))
    print_line(f"The policy: {file.path}")
    path = output / "comparison.png"
    _draw(variants, images, path)
    print_line(f"The images: {path}")
    write_json(json, {"policy": str(file.path), "images": str(path), "results": rows})


def _repeats(old: Policy | None, count: int, steps: int) -> bool:
    """Whether a policy is that of a demo like this one, which finds the same again."""
    from ertacache.calibration.session import number_runs
    from ertacache.models import load_prompts

    if old is None or old.profile is None:
        return False
    runs = number_runs(load_prompts(MODEL, "calibration")[:count])
    return old.profile.num_steps == steps and set(old.profile.runs) == set(runs)


def _calibrate(
    pipe: Any, count: int, arguments: dict[str, Any], stage: Stages
) -> tuple[Policy, dict[str, FittedPlan]]:
    from ertacache.calibration.profile import profile_runs
    from ertacache.calibration.refit import refit_budget
    from ertacache.calibration.session import Session
    from ertacache.calibration.trial import measure_fits
    from ertacache.core.plans import steps_for_speedup
    from ertacache.models import load_prompts

    session = Session(pipe, arguments, batch_size=8, stage=stage)
    runs = session.number_runs(load_prompts(MODEL, "calibration")[:count])
    policy = measure_fits(session, profile_runs(session, runs, keep=runs), runs)
    reference = session.reference(runs)
    plans = {}
    for speedup in SPEEDUPS:
        budget = steps_for_speedup(reference.schedule.num_steps, speedup)
        plans[f"ertacache {speedup:g}x"] = refit_budget(session, policy, reference, budget)
    return policy, plans


def _measure(
    session: Session, policy: Policy, plans: dict[str, FittedPlan], count: int
) -> tuple[list[Variant], list[Tensor]]:
    import torch

    from ertacache.calibration.session import HELDOUT_SEED, number_runs
    from ertacache.calibration.validate import measure, variants_of
    from ertacache.models import load_prompts

    variants = variants_of(policy, plans)
    images: list[list[Tensor]] = [[] for _ in variants]
    measure(
        session,
        variants,
        number_runs(load_prompts(MODEL, "heldout")[:count], HELDOUT_SEED),
        stage="generate",
        observe=lambda variant, _, result: images[variants.index(variant)].append(result),
    )
    return variants, [torch.cat(batches) for batches in images]


def _results(variants: list[Variant], images: list[Tensor]) -> list[dict[str, Any]]:
    """What was measured of every variant, for machines; the full run comes first."""
    from ertacache.metrics import ssim

    full = median(variants[0].seconds)
    return [
        {
            "name": variant.name,
            "computed_steps": variant.computed_steps,
            "seconds": (seconds := median(variant.seconds)),
            "speedup": full / seconds,
            "psnr": sum(variant.decibels) / len(variant.decibels),
            "ssim": ssim(shown, images[0]).mean().item(),
        }
        for variant, shown in zip(variants, images, strict=True)
    ]


def _print_results(results: list[dict[str, Any]], count: int) -> None:
    rows = []
    for place, row in enumerate(results):
        cells = [row["name"], str(row["computed_steps"]), f"{row['seconds']:.2f}"]
        cells.append(f"{row['speedup']:.2f}x")
        close = [decibels(row["psnr"]), f"{row['ssim']:.4f}"]
        rows.append([*cells, *(close if place else ["", ""])])
    title = f"{count} held-out prompts, against the full run"
    columns = ["", "computed steps", "seconds a batch", "speed-up", "PSNR", "SSIM"]
    print_table(title, columns, rows)


def _draw(variants: list[Variant], images: list[Tensor], path: Path) -> None:
    from ertacache.report.grids import difference, grid

    reference = images[0][:SHOWN]
    rows = [(f"full run, {variants[0].computed_steps} steps", reference)]
    for variant, shown in zip(variants, images, strict=True):
        if variant.name.startswith("ertacache"):
            label = f"{variant.name}, {variant.computed_steps} steps computed"
            rows.append((label, shown[:SHOWN]))
            rows.append(("difference, 8 times", difference(shown[:SHOWN], reference)))
    write_image(grid(rows, scale=2), path)
