"""How close each method comes to the full run, on bundled models and held-out prompts.

What it measures: PSNR and SSIM of the decoded result to the full run of the same prompt and seed,
with a bootstrap interval over prompts, and the speed-up, at half and a third of the steps computed.
All methods take turns on every batch; times are medians. Methods:

- ``trajectory``: ours, with and without the refit; both with the fits that trials on the
  calibration prompts found;
- ``paper``: the paper's, solved from the profile alone;
- ``network``: the paper's, calibrated on the network as it is printed: the policy search on
  accelerated runs, then phi, K and B measured in runs under that policy;

the paper's each with all three parts, without timestep adjustment, and the policy alone (on the
network also with one gain and bias per element in place of one per step); then plain reuse and
fewer steps. Writes its rows into ``results/fidelity.json``, in place of older rows of the same
models and methods. The last line of standard output is the JSON of the rows, compact.

Ours without the refit predicts its error: the root mean square distance of the final latent to that
of the full run. At 1.5 to 5 times fewer computed steps it is compared with the distance that is
measured on the held-out prompts, typically (geometric mean), in ``predictions.json`` beside the
other file.

    python benchmarks/fidelity.py                       # every bundled model
    python benchmarks/fidelity.py emoji-wan emoji-cogvideox
    python benchmarks/fidelity.py --methods trajectory  # and the alternatives of every run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from policies import calibrated
from rows import RESULTS, ModelParser, Row, mean_row, read_rows, replace_rows, show_progress
from torch import Tensor

from ertacache.calibration.lockstep import run_plan
from ertacache.calibration.paper import PaperCalibration
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.solve import solve
from ertacache.calibration.validate import Variant, measure, variants_of
from ertacache.core.distance import typical_distance
from ertacache.core.plans import TrajectoryPlan, steps_for_speedup
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.solve import PlanSolver, profile_of
from ertacache.metrics import ssim
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUPS = (2.0, 3.0)
PREDICTED = (1.5, 2.0, 3.0, 4.0, 5.0)
NO_REFIT = "trajectory, no refit"
GROUPS = ("trajectory", "paper", "network")
NETWORK = "paper (network-calibrated)"
PARTS: dict[str, dict[str, bool]] = {
    "": {},
    ", no timesteps": {"adjust_timesteps": False},
    ", policy only": {"adjust_timesteps": False, "rectify": False},
}
NETWORK_PARTS: dict[str, dict[str, Any]] = PARTS | {
    ", no timesteps, K and B per element": {"adjust_timesteps": False, "mode": "element"},
}


def make_plans(session: Session, known: Policy, groups: set[str]) -> dict[str, FittedPlan]:
    """Plans of every method at half and a third of the steps, from the same prompts."""
    plans: dict[str, FittedPlan] = {}
    for speedup in SPEEDUPS:
        found: Iterator[tuple[str, FittedPlan]]
        if "trajectory" in groups:
            found = trajectory_plans(known, speedup)
            plans |= {f"{title} {speedup}": plan for title, plan in found}
        if "paper" in groups:
            for part, options in PARTS.items():
                solved = solve(known, method="paper", speedup=speedup, **options)
                plans[f"paper{part} {speedup}"] = solved.default
        if "network" in groups:
            found = network_plans(session, known, speedup)
            plans |= {f"{title} {speedup}": plan for title, plan in found}
    return plans


def trajectory_plans(known: Policy, speedup: float) -> Iterator[tuple[str, FittedPlan]]:
    """Ours, before and after the refit; none where none is predicted to help."""
    profile = profile_of(known)
    budget = steps_for_speedup(profile.num_steps, speedup)
    solved = PlanSolver(known).solve(profile.schedule, budget)
    if solved is None:
        print(f"trajectory {speedup:g}x: no plan is predicted to be better than plain reuse")
        return
    yield NO_REFIT, solved
    refitted = known.find_plan(profile.schedule, budget)
    assert refitted is not None
    yield "trajectory", refitted


def network_plans(
    session: Session, known: Policy, speedup: float
) -> Iterator[tuple[str, FittedPlan]]:
    """The paper's, calibrated on the network: one search, then the parts of the method."""
    profile = profile_of(known)
    calibration = PaperCalibration(session, known, profile.runs)
    found = calibration.search_budget(steps_for_speedup(profile.num_steps, speedup))
    print(f"search {speedup:g}x: {len(found.compute_steps)} computed, lambda {found.threshold:.3g}")
    for part, options in NETWORK_PARTS.items():
        plan = calibration.fit(found, **options)
        yield f"{NETWORK}{part}", FittedPlan(plan, calibration.sigmas)


def predictions(
    session: Session, known: Policy, heldout: Sequence[ProfiledPrompt], name: str
) -> list[Row]:
    """Predicted and measured distance of ours without the refit, one row per speed-up."""
    profile, solver = profile_of(known), PlanSolver(known)
    reference, rows = session.reference(heldout), []
    within = [speedup for speedup in PREDICTED if speedup <= profile.num_steps / 2]
    for budget in dict.fromkeys(steps_for_speedup(profile.num_steps, s) for s in within):
        solved = solver.solve(profile.schedule, budget)
        if solved is None or not isinstance(solved.plan, TrajectoryPlan):
            continue
        found = run_plan(session, reference, solved.plan, fingerprint=known.fingerprint)
        predicted, measured = solved.predicted_error or 0.0, typical_distance(found)
        rows.append(
            {
                "model": name,
                "steps": profile.num_steps,
                "compute_steps": budget,
                "predicted_rmse": _significant(predicted),
                "measured_rmse": _significant(measured),
                "ratio": _significant(measured / predicted),
                "predicted_psnr_db": round(solver.psnr(predicted), 2),
                "prompts": len(heldout),
            }
        )
    return rows


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def make_row(
    name: str, variant: Variant, shown: Tensor, *, reference: Tensor, full: Variant
) -> Row:
    """One row of the results file."""
    ours = variant.policy is not None and variant.name != "plain reuse"  # named with its speed-up
    return {
        "model": name,
        "method": variant.name.rsplit(" ", 1)[0] if ours else variant.name,
        "steps": full.num_inference_steps,
        "compute_steps": variant.computed_steps,
        **mean_row(variant.decibels),
        "ssim": round(ssim(shown, reference).mean().item(), 5),
        "speedup": round(median(full.seconds) / median(variant.seconds), 2),
        "prompts": len(shown),
    }


def measure_model(name: str, options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """The rows of a model, and those of its predictions."""
    session = Session(
        load_pipeline(name),
        MODELS[name].call_arguments,
        batch_size=options.batch,
        stage=lambda stage: show_progress(f"{name}: {stage}"),
    )
    runs = number_runs(load_prompts(name, "calibration")[: options.calibration])
    heldout = number_runs(load_prompts(name, "heldout")[: options.heldout], HELDOUT_SEED)
    known, predicted = calibrated(session, runs), list[Row]()
    if "trajectory" in options.methods:
        known = calibrated(session, runs, speedups=SPEEDUPS)
        predicted = predictions(session, known, heldout, name)
    plans = make_plans(session, known, set(options.methods))
    variants = _distinct(variants_of(known, plans))
    results: list[list[Tensor]] = [[] for _ in variants]
    measure(
        session,
        variants,
        heldout,
        observe=lambda variant, _, result: results[variants.index(variant)].append(result),
    )
    shown = [torch.cat(batches) for batches in results]
    rows = [
        make_row(name, variant, result, reference=shown[0], full=variants[0])
        for variant, result in zip(variants[1:], shown[1:], strict=True)
    ]
    return [with_prediction(row, predicted) for row in rows], predicted


def with_prediction(row: Row, predicted: Sequence[Row]) -> Row:
    """A row of ours without the refit gets the distances that were predicted and measured."""
    for known in predicted:
        if (row["method"], row["compute_steps"]) == (NO_REFIT, known["compute_steps"]):
            return row | {key: known[key] for key in ("predicted_rmse", "measured_rmse")}
    return row


def merge(old: list[Row], fresh: list[Row]) -> list[Row]:
    """The fresh rows of a model, and the old ones of methods not measured again, best first."""
    measured = {row["method"] for row in fresh}
    rows = [row for row in old if row["method"] not in measured] + fresh
    return sorted(rows, key=lambda row: (-row["compute_steps"], -row["psnr_db"]))


def _distinct(variants: list[Variant]) -> list[Variant]:
    """Alternatives at the two budgets only, not at the paper's numbers of computed steps."""
    steps = variants[0].num_inference_steps
    budgets = {steps, *(steps_for_speedup(steps, speedup) for speedup in SPEEDUPS)}
    return [v for v in variants if v.name.startswith("paper") or v.computed_steps in budgets]


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other, and write their rows."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=32, help="calibration prompts")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts")
    parser.add_argument("--batch", type=int, default=8, help="prompts per call")
    parser.add_argument("--methods", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--results", type=Path, default=RESULTS / "fidelity.json")
    options = parser.parse(arguments)
    rows: list[Row] = []
    for name in options.models:
        fresh, predicted = measure_model(name, options)
        if predicted:
            replace_rows(options.results.with_name("predictions.json"), name, predicted)
        kept = [] if set(options.methods) == set(GROUPS) else read_rows(options.results)
        old = [row for row in kept if row["model"] == name]
        replace_rows(options.results, name, merge(old, fresh))
        for row in fresh:
            print(f"{row['method']:64}{row['compute_steps']:4}{row['psnr_db']:8}{row['speedup']:8}")
        rows += fresh
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
