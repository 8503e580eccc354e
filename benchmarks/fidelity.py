"""How close each method comes to the full run, on a bundled model and held-out prompts.

What it measures: PSNR and SSIM of the decoded result to the full run of the same prompt and seed,
with a bootstrap interval over prompts, and the speed-up, at half and a third of the steps computed.
All methods take turns on every batch; times are medians. Methods: ours, ours without the refit, the
paper's (all three parts; without timestep adjustment; the policy alone), plain reuse, fewer steps.
Writes its rows into ``results/fidelity.json``, in place of older rows of the same model. The last
line of standard output is the JSON of the rows, compact.

    python benchmarks/fidelity.py emoji-flux
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.procedure import HELDOUT_SEED
from ertacache.calibration.profiling import number_runs, profile
from ertacache.calibration.refining import collect_reference, refine
from ertacache.calibration.solving import solve
from ertacache.calibration.validation import Way, measure, ways_of
from ertacache.formats.policy import Policy
from ertacache.metrics import ssim
from ertacache.models import MODELS, load_pipeline, load_prompts

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "fidelity.json"
CALIBRATION, HELDOUT, BATCH = 16, 64, 8


def make_policies(pipe: Any, name: str, call: dict[str, Any]) -> dict[str, Policy]:
    """Policies of every method at half and a third of the steps, from one profile."""
    kept: list[Any] = []
    known = profile(
        pipe,
        load_prompts(name, "calibration")[:CALIBRATION],
        batch_size=BATCH,
        observe=lambda runs, run: kept.append((runs, run)),
        **call,
    )
    reference = collect_reference(pipe, known.prompts, kept, batch_size=BATCH, call=call)
    policies = {}
    for speedup in (2.0, 3.0):
        solved = solve(known, speedup=speedup)
        policies[f"trajectory, no refit {speedup}"] = solved
        policies[f"trajectory {speedup}"] = refine(
            pipe, solved, known, reference=reference, call=call
        )
        for title, options in (
            ("paper", {}),
            ("paper, no timesteps", {"adjust_timesteps": False}),
            ("paper, policy only", {"adjust_timesteps": False, "rectify": False}),
        ):
            policies[f"{title} {speedup}"] = solve(
                known, method="paper", speedup=speedup, **options
            )
    return policies


def interval(values: list[float]) -> tuple[float, float]:
    """The central 95 % of bootstrapped means."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.tensor(values)[
        torch.randint(len(values), (2000, len(values)), generator=generator)
    ]
    low, high = sample.mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def make_row(name: str, way: Way, shown: Tensor, *, truth: Tensor, full: Way) -> dict[str, Any]:
    """One row of the results file."""
    low, high = interval(way.decibels)
    return {
        "model": name,
        "method": way.name.rsplit(" ", 1)[0]
        if way.policy and way.name != "plain reuse"
        else way.name,
        "steps": full.num_inference_steps,
        "compute_steps": way.computed_steps,
        "psnr_db": round(sum(way.decibels) / len(way.decibels), 2),
        "psnr_low": round(low, 2),
        "psnr_high": round(high, 2),
        "ssim": round(ssim(shown, truth).mean().item(), 5),
        "speedup": round(median(full.seconds) / median(way.seconds), 2),
        "prompts": len(shown),
    }


def main() -> None:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    name = parser.parse_args().model
    pipe, call = load_pipeline(name), MODELS[name].call_arguments
    ways = _distinct(ways_of(make_policies(pipe, name, call)))
    pictures: list[list[Tensor]] = [[] for _ in ways]
    measure(
        pipe,
        ways,
        number_runs(load_prompts(name, "heldout")[:HELDOUT], HELDOUT_SEED),
        batch_size=BATCH,
        progress=lambda done, calls: print(f"{done} of {calls}", end="\r", flush=True),
        call=call,
        observe=lambda way, _, result: pictures[ways.index(way)].append(result),
    )
    shown = [torch.cat(batches) for batches in pictures]
    rows = [
        make_row(name, way, result, truth=shown[0], full=ways[0])
        for way, result in zip(ways[1:], shown[1:], strict=True)
    ]
    rows.sort(key=lambda row: (-row["compute_steps"], -row["psnr_db"]))
    others = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    others = [row for row in others if row["model"] != name]
    RESULTS.write_text(json.dumps(others + rows, indent=1) + "\n")
    for row in rows:
        print(f"{row['method']:24}{row['compute_steps']:4}{row['psnr_db']:8}{row['speedup']:8}")
    print(json.dumps(rows, separators=(",", ":")))


def _distinct(ways: list[Way]) -> list[Way]:
    """Alternatives at the two budgets only, not at the paper's odd numbers of computed steps."""
    steps = ways[0].num_inference_steps
    budgets = {steps, steps // 2, steps // 3}
    return [way for way in ways if way.name.startswith("paper") or way.computed_steps in budgets]


if __name__ == "__main__":
    main()
