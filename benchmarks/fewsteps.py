"""The gain of a policy when a run has only a few steps, as those of distilled models do.

The bundled models are not distilled; they are run with 4, 6 and 8 steps. At each, a policy is made
for every number of computed steps from half of them to all but one, and ``calibrate`` measures it
against plain reuse and fewer steps on held-out prompts and recommends it or not.

Writes its rows into ``results/fewsteps.json``, in place of older rows of the same models.

    python benchmarks/fewsteps.py                       # every bundled model
    python benchmarks/fewsteps.py emoji-flux
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rows import RESULTS, ModelParser, Row, replace_rows

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.validate import recommend
from ertacache.formats.policy import PolicyError
from ertacache.models import MODELS, load_pipeline, load_prompts

STEPS = (4, 6, 8)


def evaluate(pipe: Any, name: str, steps: int, computed: int, options: argparse.Namespace) -> Row:
    """One policy and whether it is recommended."""
    policy = calibrate(
        pipe,
        load_prompts(name, "calibration")[: options.calibration],
        heldout=load_prompts(name, "heldout")[: options.heldout],
        compute_steps=computed,
        batch_size=options.batch_size,
        **(MODELS[name].call_arguments | {"num_inference_steps": steps}),
    )
    plan = policy.default
    found = {row.method: row for row in plan.validation}
    verdict = recommend(plan.validation)
    return {
        "model": name,
        "steps": steps,
        "compute_steps": len(plan.compute_steps),
        "speedup": round(found["policy"].speedup, 2),
        "psnr_db": round(found["policy"].psnr, 2),
        "plain_db": round(found["plain reuse"].psnr, 2),
        "fewer_db": round(found["fewer steps"].psnr, 2),
        "verdict": None if verdict.recommended else str(verdict),
        "prompts": found["policy"].prompts,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other, and write their rows."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=32, help="calibration prompts")
    parser.add_argument("--heldout", type=int, default=32, help="held-out prompts")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts per call")
    parser.add_argument("--results", type=Path, default=RESULTS / "fewsteps.json")
    options = parser.parse(arguments)
    for name in options.models:
        pipe, rows = load_pipeline(name), []
        for steps in STEPS:
            for computed in range(steps - 1, steps // 2 - 1, -1):
                try:
                    rows.append(evaluate(pipe, name, steps, computed, options))
                except PolicyError as error:  # not even plain reuse is predicted to help
                    print(f"{name}: {error}", flush=True)
                else:
                    print(rows[-1], flush=True)
        replace_rows(options.results, name, rows)


if __name__ == "__main__":
    main()
