"""What coefficients per group and the second history give, against one set of coefficients.

One profile and one trial per bundled model, then three policies refitted in closed loop, at a third
and a fifth of the steps computed: ``one`` has one group, ``groups`` may divide the latent,
``chosen`` may also combine the outputs of one guidance branch. What is divided is chosen on
calibration prompts, as ``calibrate`` does. Each is compared with the full run on held-out prompts,
at the calibrated size and at two others: PSNR of the decoded result, with a bootstrap interval over
prompts, and the PSNR that nine of ten prompts exceed.

Writes its rows into ``results/groups.json``. The last line of standard output is the JSON of the
rows, compact.

    python benchmarks/groups.py                       # every bundled model
    python benchmarks/groups.py emoji-wan
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from policies import calibrated
from rows import RESULTS, ModelParser, Row, mean_row, replace_rows, show_progress

from ertacache.calibration.reference import Reference
from ertacache.calibration.refit import refit_budget
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.validate import Variant, measure
from ertacache.core.plans import Target, TrajectoryPlan
from ertacache.formats.policy import Policy
from ertacache.integration.solve import profile_of
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUPS = (3.0, 5.0)
SIZES = ((1.5, 1.5), (1.0, 1.5))  # height and width, as factors of the calibrated ones
GRID = 16  # sizes are multiples of it
KINDS = ("one", "groups", "chosen")


def session_of(name: str, pipe: Any, options: argparse.Namespace, **changes: Any) -> Session:
    """A session at the model's own setting, some of it changed."""
    return Session(
        pipe,
        MODELS[name].call_arguments | changes,
        batch_size=options.batch,
        stage=lambda stage: show_progress(f"{name}: {stage}"),
    )


def narrowed(policy: Policy, reference: Reference, kind: str) -> tuple[Policy, Reference]:
    """A policy and its full runs, as far as a kind of plan may use them."""
    facts = replace(reference.facts, branch=False)
    if kind == "one":
        profile = replace(profile_of(policy), by_group=None)
        policy, facts = replace(policy, profile=profile), replace(facts, layout=None)
    return policy, replace(reference, facts=facts)


def policies(name: str, pipe: Any, options: argparse.Namespace) -> dict[str, Policy]:
    """The three policies, each with a refitted plan for every speed-up."""
    session = session_of(name, pipe, options)
    runs = number_runs(load_prompts(name, "calibration")[: options.calibration])
    chosen = calibrated(session, runs, speedups=SPEEDUPS)
    known, reference = replace(chosen, plans=()), session.reference(runs)
    found = {"chosen": chosen}
    for kind in ("one", "groups"):
        policy, full = narrowed(known, reference, kind)
        for speedup in SPEEDUPS:
            budget = Target(speedup=speedup).budget(full.schedule.num_steps)
            assert budget is not None
            policy = policy.with_plan(refit_budget(session, policy, full, budget))
        found[kind] = policy
    return found


def sizes(name: str) -> Iterator[tuple[int, int]]:
    """Height and width: the calibrated ones, then others."""
    call = MODELS[name].call_arguments
    own = call["height"], call["width"]
    yield own
    for factors in SIZES:
        found = [max(1, round(f * n / GRID)) * GRID for f, n in zip(factors, own, strict=True)]
        yield found[0], found[1]


def evaluate(
    name: str, pipe: Any, made: dict[str, Policy], size: tuple[int, int], options: Any
) -> Iterator[Row]:
    """The rows of a size."""
    session = session_of(name, pipe, options, height=size[0], width=size[1])
    steps = MODELS[name].num_inference_steps
    variants = [Variant("full", steps, None, steps)]
    for speedup in SPEEDUPS:
        target = Target(speedup=speedup)
        computed = target.budget(steps)
        assert computed is not None
        variants += [Variant(k, computed, made[k], steps, target) for k in KINDS]
        variants.append(Variant("fewer", computed, None, computed))
    heldout = number_runs(load_prompts(name, "heldout")[: options.heldout], HELDOUT_SEED)
    measure(session, variants, heldout)
    own = (MODELS[name].call_arguments["height"], MODELS[name].call_arguments["width"])
    for place, speedup in enumerate(SPEEDUPS):
        four = variants[1 + 4 * place : 5 + 4 * place]
        row: Row = {
            "model": name,
            "height": size[0],
            "width": size[1],
            "calibrated": size == own,
            "steps": steps,
            "compute_steps": four[0].computed_steps,
        }
        if size == own:
            row |= {f"{kind}_plan": described(made[kind], speedup) for kind in KINDS}
        for variant in four:
            row |= mean_row(variant.decibels, variant.name)
            tenth = quantiles(variant.decibels, n=10, method="inclusive")[0]
            row[f"{variant.name}_p10"] = round(tenth, 2)
        gained = [a - b for a, b in zip(four[2].decibels, four[0].decibels, strict=True)]
        row |= mean_row(gained, "gain")
        yield row | {"prompts": len(heldout), "calibration": options.calibration}


def described(policy: Policy, speedup: float) -> str:
    """Groups and history of a plan, such as ``"16 channels x 3 bands, 5 outputs"``."""
    budget = Target(speedup=speedup).budget(profile_of(policy).num_steps)
    (plan,) = [p.plan for p in policy.plans if len(p.compute_steps) == budget]
    assert isinstance(plan, TrajectoryPlan)
    text = f"{plan.groups}, {plan.history} outputs"
    return f"{text}, and as many of one branch" if plan.branch else text


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other, and write their rows."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=32, help="calibration prompts")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts")
    parser.add_argument("--batch", type=int, default=8, help="prompts per call")
    parser.add_argument("--results", type=Path, default=RESULTS / "groups.json")
    options = parser.parse(arguments)
    rows: list[Row] = []
    for name in options.models:
        pipe = load_pipeline(name)
        made = policies(name, pipe, options)
        found = [row for size in sizes(name) for row in evaluate(name, pipe, made, size, options)]
        replace_rows(options.results, name, found)
        rows += found
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
