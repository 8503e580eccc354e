"""How close each method comes to the full run, on bundled models and held-out prompts.

What it measures: PSNR and SSIM of the decoded result to the full run of the same prompt and seed,
with a bootstrap interval over prompts, and the speed-up, at half and a third of the steps computed.
All methods take turns on every batch; times are medians. Methods:

- ``trajectory``: ours, with and without the refit;
- ``paper``: the paper's, solved from the profile alone;
- ``network``: the paper's, calibrated on the network as it is printed: the policy search on
  accelerated runs, then phi, K and B measured in runs under that policy;

the paper's each with all three parts, without timestep adjustment, and the policy alone (on the
network also with one gain and bias per element in place of one per step); then plain reuse and
fewer steps. Writes its rows into ``results/fidelity.json``, in place of older rows of the same
models and methods. The last line of standard output is the JSON of the rows, compact.

    python benchmarks/fidelity.py                       # every bundled model
    python benchmarks/fidelity.py emoji-wan emoji-cogvideox
    python benchmarks/fidelity.py --methods trajectory  # and the alternatives of every run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rows import RESULTS, ModelParser, Row, mean_row, read_rows, replace_rows, show_progress
from torch import Tensor

from ertacache.calibration.paper import PaperCalibration
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import refit_policy
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.solve import make_policy, solve
from ertacache.calibration.validate import Variant, measure, variants_of
from ertacache.core.plans import steps_for_speedup
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.metrics import ssim
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUPS = (2.0, 3.0)
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


def make_policies(session: Session, known: Profile, groups: set[str]) -> dict[str, Policy]:
    """Policies of every method at half and a third of the steps, from the same prompts."""
    policies: dict[str, Policy] = {}
    for speedup in SPEEDUPS:
        found: Iterator[tuple[str, Policy]]
        if "trajectory" in groups:
            found = trajectory_policies(session, known, speedup)
            policies |= {f"{title} {speedup}": policy for title, policy in found}
        if "paper" in groups:
            for part, options in PARTS.items():
                title = f"paper{part} {speedup}"
                policies[title] = solve(known, method="paper", speedup=speedup, **options)
        if "network" in groups:
            found = network_policies(session, known, speedup)
            policies |= {f"{title} {speedup}": policy for title, policy in found}
    return policies


def trajectory_policies(
    session: Session, known: Profile, speedup: float
) -> Iterator[tuple[str, Policy]]:
    """Ours, before and after the refit."""
    solved = solve(known, speedup=speedup)
    yield "trajectory, no refit", solved
    yield "trajectory", refit_policy(session, solved, known, known.prompts)


def network_policies(
    session: Session, known: Profile, speedup: float
) -> Iterator[tuple[str, Policy]]:
    """The paper's, calibrated on the network: one search, then the parts of the method."""
    calibration = PaperCalibration(session, known, known.prompts)
    found = calibration.search_budget(steps_for_speedup(known.num_steps, speedup))
    print(f"search {speedup:g}x: {len(found.compute_steps)} computed, lambda {found.threshold:.3g}")
    for part, options in NETWORK_PARTS.items():
        yield f"{NETWORK}{part}", make_policy(known, calibration.fit(found, **options))


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


def measure_model(name: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a model."""
    session = Session(
        load_pipeline(name),
        MODELS[name].call_arguments,
        batch_size=options.batch,
        stage=lambda stage: show_progress(f"{name}: {stage}"),
    )
    runs = number_runs(load_prompts(name, "calibration")[: options.calibration])
    known = profile_runs(session, runs, keep=runs)
    variants = _distinct(variants_of(make_policies(session, known, set(options.methods))))
    results: list[list[Tensor]] = [[] for _ in variants]
    measure(
        session,
        variants,
        number_runs(load_prompts(name, "heldout")[: options.heldout], HELDOUT_SEED),
        observe=lambda variant, _, result: results[variants.index(variant)].append(result),
    )
    shown = [torch.cat(batches) for batches in results]
    rows = [
        make_row(name, variant, result, reference=shown[0], full=variants[0])
        for variant, result in zip(variants[1:], shown[1:], strict=True)
    ]
    return rows


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
        fresh = measure_model(name, options)
        kept = [] if set(options.methods) == set(GROUPS) else read_rows(options.results)
        old = [row for row in kept if row["model"] == name]
        replace_rows(options.results, name, merge(old, fresh))
        for row in fresh:
            print(f"{row['method']:64}{row['compute_steps']:4}{row['psnr_db']:8}{row['speedup']:8}")
        rows += fresh
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
