"""How much the number of calibration prompts matters, and which ones they are.

The counterpart of the paper's figure on the number of prompts. The calibration prompts of a model
are profiled once; policies at half and a third of the steps are then solved from 1, 2, 4 ... 64 of
them, for each number from several choices of prompts that share none (as far as there are enough):

- ``trajectory, no refit``: ours from the profile alone, without trials;
- ``trajectory``: ours with trials and after the closed-loop refit, from 2 to 32 prompts. It runs
  the network, so only the first choice of each number is refitted (``--refits``);
- ``paper``: the paper's with all three parts, from the profile alone.

What it measures: PSNR of the decoded result to the full run on held-out prompts. A row holds the
mean over prompts and choices with its bootstrap interval over prompts, and the mean of each choice.
``fewer steps`` (no prompts) stands beside them. Writes its rows into ``results/sensitivity.json``,
number by number, in place of older rows of the same model and number, and draws
``docs/images/sensitivity-MODEL.png``. The last line of standard output is the JSON of the rows,
compact.

    python benchmarks/sensitivity.py                    # every bundled model
    python benchmarks/sensitivity.py emoji-flux --numbers 8 16 --choices 2
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from plots import draw_sensitivity
from rows import RESULTS, ROOT, ModelParser, Row, mean_row, read_rows, replace_rows
from torch import Tensor

from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import REFIT_PROMPTS, refit_budget
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.solve import solve
from ertacache.calibration.trial import measure_fits
from ertacache.core.plans import steps_for_speedup
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.solve import profile_of, with_frontier
from ertacache.metrics import IDENTICAL, psnr
from ertacache.models import MODELS, load_pipeline, load_prompts

NUMBERS = (1, 2, 4, 8, 16, 32, 64)
SPEEDUPS = (2.0, 3.0)


def choose(total: int, number: int, choices: int, *, seed: int = 0) -> list[list[int]]:
    """Several choices of ``number`` out of ``total`` prompts that share none.

    Example:
        >>> [len(choice) for choice in choose(64, 32, 3)]
        [32, 32]
    """
    order = random.Random(seed).sample(range(total), total)
    places = range(0, min(choices, total // number) * number, number)
    return [sorted(order[place : place + number]) for place in places]


def select(known: Policy, chosen: Sequence[int]) -> Policy:
    """The policy with the profile of some of the prompts."""
    profile = profile_of(known)
    return replace(known, profile=profile.select([profile.runs[k] for k in chosen]))


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Held-out prompts with the results of their full runs."""

    session: Session
    batches: list[list[ProfiledPrompt]]
    references: list[Tensor]

    @classmethod
    def make(cls, session: Session, prompts: Sequence[str]) -> Evaluation:
        """Run the held-out prompts in full."""
        batches = session.batches(number_runs(prompts, HELDOUT_SEED))
        return cls(session, batches, [session.generate(batch).results for batch in batches])

    def decibels(self, policy: Policy | None = None, **changes: Any) -> list[float]:
        """PSNR of every held-out prompt, with a policy or with changes of the call."""
        values: list[float] = []
        for batch, reference in zip(self.batches, self.references, strict=True):
            made = self.session.generate(batch, policy, **changes)
            values += psnr(made.results, reference).clamp_max(IDENTICAL).tolist()
        return values


def plans(session: Session, known: Policy, *, refit: bool) -> Iterator[tuple[str, int, FittedPlan]]:
    """Every method's plan of every budget, from some of the calibration prompts."""
    profile, bare = profile_of(known), with_frontier(known)
    budgets = [steps_for_speedup(profile.num_steps, speedup) for speedup in SPEEDUPS]
    for budget in budgets:
        yield "paper", budget, solve(known, method="paper", compute_steps=budget).default
        try:
            yield "trajectory, no refit", budget, solve(bare, compute_steps=budget).default
        except PolicyError as error:
            print(error)
    if refit and 1 < profile.num_runs <= REFIT_PROMPTS:
        tried = measure_fits(session, known, profile.runs)
        for budget in budgets:
            reference = session.reference(profile.runs)
            yield "trajectory", budget, refit_budget(session, tried, reference, budget)


def measure_number(
    evaluation: Evaluation, known: Policy, number: int, options: argparse.Namespace
) -> list[Row]:
    """One row per method and budget: all choices of a number of prompts."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    computed: dict[tuple[str, int], list[int]] = {}
    for place, chosen in enumerate(choose(profile_of(known).num_runs, number, options.choices)):
        part, refit = select(known, chosen), place < options.refits
        for title, budget, plan in plans(evaluation.session, part, refit=refit):
            policy = Policy(known.fingerprint, plans=(plan,))
            found.setdefault((title, budget), []).append(evaluation.decibels(policy))
            computed.setdefault((title, budget), []).append(len(plan.compute_steps))
    return [make_row(number, key, values, computed[key]) for key, values in found.items()]


def make_row(
    number: int, key: tuple[str, int], values: Sequence[Sequence[float]], computed: Sequence[int]
) -> Row:
    """One row: the mean over choices and prompts, and each choice's own mean."""
    of_prompts = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
    return {
        "method": key[0],
        "budget": key[1],
        "prompts": number,
        "computed": list(computed),
        **mean_row(of_prompts),
        "choices_db": [round(sum(one) / len(one), 2) for one in values],
        "heldout": len(of_prompts),
    }


def put_rows(path: Path, model: str, steps: int, rows: Sequence[Row]) -> list[Row]:
    """Put rows in the place of those of the same model and number of prompts; all of the model."""
    fresh = [{"model": model, "steps": steps, **row} for row in rows]
    numbers = {row["prompts"] for row in fresh}
    kept = [r for r in read_rows(path) if r["model"] != model or r["prompts"] not in numbers]
    mine = [row for row in [*kept, *fresh] if row["model"] == model]
    mine.sort(key=lambda row: (row["prompts"], -row["budget"], row["method"]))
    replace_rows(path, model, mine)
    return mine


def measure_model(name: str, options: argparse.Namespace) -> list[Row]:
    """All rows of a model."""
    session = Session(load_pipeline(name), MODELS[name].call_arguments, batch_size=options.batch)
    prompts = load_prompts(name, "calibration")[: max(options.numbers) * options.choices]
    print(f"{name}: profile {len(prompts)} prompts", flush=True)
    runs = number_runs(prompts)
    known = profile_runs(session, runs, keep=runs)
    evaluation = Evaluation.make(session, load_prompts(name, "heldout")[: options.heldout])
    steps, fewer = profile_of(known).num_steps, []
    for budget in (steps_for_speedup(steps, speedup) for speedup in SPEEDUPS):
        values = evaluation.decibels(num_inference_steps=budget)
        fewer.append(make_row(0, ("fewer steps", budget), [values], [budget]))
    mine = put_rows(options.results, name, steps, fewer)
    for number in options.numbers:
        fresh = measure_number(evaluation, known, number, options)
        mine = put_rows(options.results, name, steps, fresh)
        for row in fresh:
            shown = row["method"], row["budget"], row["psnr_db"], row["choices_db"]
            print(f"{name}, {number} prompts:", *shown, flush=True)
        draw_sensitivity(mine, options.images / f"sensitivity-{name}.png")
    return mine


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other."""
    parser = ModelParser(__doc__)
    parser.add_argument("--numbers", type=int, nargs="+", default=NUMBERS, help="of prompts")
    parser.add_argument("--choices", type=int, default=3, help="choices of prompts per number")
    parser.add_argument("--heldout", type=int, default=32, help="held-out prompts")
    parser.add_argument("--batch", type=int, default=16, help="prompts per call")
    parser.add_argument("--refits", type=int, default=1, help="choices that are refitted too")
    parser.add_argument("--results", type=Path, default=RESULTS / "sensitivity.json")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse(arguments)
    rows = [row for name in options.models for row in measure_model(name, options)]
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
