"""What a policy loses when the model changes after calibration: ``ertacache check``, measured.

`emoji-flux` is calibrated as it is. Then one thing at a time is changed: a LoRA is loaded
(`training/lora.py`), the weights are quantised to int8 (torchao) or rounded to bfloat16, the
guidance is another. Each time ``policy.check`` runs held-out prompts in full and accelerated, both
on the changed model. ``change_db`` is how far the change itself moves the full run, on the first
prompts.

Writes ``results/check.json``. The last line of standard output is the JSON of the rows, compact.

    python -m training.lora checkpoints/lora
    python benchmarks/check.py checkpoints/lora
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from policies import calibrated
from rows import RESULTS, Row, replace_rows, show_progress
from torch import Tensor

from ertacache.calibration.check import check
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.validate import validate
from ertacache.cli.check import quantize
from ertacache.cli.loading import load_lora
from ertacache.core.plans import steps_for_speedup
from ertacache.formats.policy import Policy
from ertacache.integration.solve import profile_of
from ertacache.metrics import psnr
from ertacache.models import MODELS, load_pipeline, load_prompts

MODEL = "emoji-flux"
SPEEDUPS = (2.0, 3.0)
CALIBRATION, HELDOUT, COMPARED = 32, 64, 8  # prompts
BATCH = 8  # of the calibration, as in the other benchmarks
GUIDANCE = 7.0


@dataclass(frozen=True)
class Change:
    """One change of the calibrated model.

    Attributes:
        name: as the table shows it.
        apply: changes the pipeline in place.
        call: arguments of the pipeline that differ.
    """

    name: str
    apply: Callable[[Any], object] = lambda pipe: None
    call: Mapping[str, Any] = field(default_factory=dict)


def changes(model: Any, lora: Path) -> list[Change]:
    """What is changed, one at a time; nothing at first."""
    return [
        Change("nothing"),
        Change("LoRA", lambda pipe: load_lora(pipe, str(lora))),
        Change("int8 weights", quantize),
        Change("bfloat16", lambda pipe: pipe.to(torch.bfloat16)),
        Change(f"guidance {GUIDANCE:g}", call={model.guidance_argument: GUIDANCE}),
    ]


def make_policy(name: str, heldout: list[str], count: int) -> Policy:
    """The policy of the model as it is, measured on held-out prompts as ``calibrate`` does."""
    session = Session(load_pipeline(name), MODELS[name].call_arguments, batch_size=BATCH)
    runs = session.number_runs(load_prompts(name, "calibration")[:count])
    known = calibrated(session, runs, speedups=SPEEDUPS)
    budgets = {steps_for_speedup(profile_of(known).num_steps, factor) for factor in SPEEDUPS}
    plans = [plan for plan in known.plans if len(plan.compute_steps) in budgets]
    unseen = session.number_runs(heldout, HELDOUT_SEED)
    return replace(known, plans=tuple(validate(session, known, plans, unseen)))


def full_runs(pipe: Any, call: Mapping[str, Any], prompts: list[str]) -> Tensor:
    """Results of the pipeline as it is."""
    session = Session(pipe, call, batch_size=BATCH)
    batches = session.batches(number_runs(prompts))
    return torch.cat([session.generate(batch).results for batch in batches])


def measure(name: str, policy: Policy, lora: Path, prompts: list[str]) -> list[Row]:
    """The rows of all changes."""
    model, rows = MODELS[name], []
    known: Tensor | None = None
    for change in changes(model, lora):
        pipe, call = load_pipeline(name), model.call_arguments | dict(change.call)
        change.apply(pipe)
        full = full_runs(pipe, call, prompts[:COMPARED])
        known = full if known is None else known
        report = show_progress(f"{name}, {change.name}")
        found = check(
            policy,
            pipe,
            prompts,
            speedup=SPEEDUPS,
            batch_size=BATCH,
            stage=lambda _, report=report: report,
            **call,
        )
        moved = None if full is known else round(psnr(full, known).mean().item(), 2)
        rows += [_row(name, change, plan.to_json(), moved) for plan in found.plans]
    return rows


def _row(name: str, change: Change, found: Mapping[str, Any], moved: float | None) -> Row:
    facts = ("computed_steps", "num_steps", "prompts", "failed", "source")
    row = {"model": name, "change": change.name} | {fact: found[fact] for fact in facts}
    numbers = {key: round(found[key], 2) for key in ("psnr", "expected_psnr", "lost_db")}
    return row | numbers | {"change_db": moved}


def main(arguments: list[str] | None = None) -> None:
    """Calibrate, measure, write the rows and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lora", type=Path, help="folder of training/lora.py")
    parser.add_argument("--prompts", type=int, default=HELDOUT, help="held-out prompts")
    parser.add_argument("--calibration", type=int, default=CALIBRATION, help="calibration prompts")
    parser.add_argument("--policy", type=Path, help="a calibrated policy, in place of a new one")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "check.json")
    options = parser.parse_args(arguments)
    heldout = load_prompts(MODEL, "heldout")[: options.prompts]
    warnings.simplefilter("ignore")  # of changed conditions: they are what is measured
    if options.policy is None:
        policy = make_policy(MODEL, heldout, options.calibration)
    else:
        policy = Policy.load(options.policy)
    rows = measure(MODEL, policy, options.lora, heldout)
    replace_rows(options.output, MODEL, rows)
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
