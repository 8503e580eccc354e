"""Whether a policy works where it was not calibrated: other guidance, sizes and batches.

One policy per bundled model, calibrated at its default guidance and size, at half of the
steps computed. Then one thing at a time is changed, and on held-out prompts the policy
and fewer steps are each compared with the full run at the same setting: PSNR of the decoded
result, with a bootstrap interval over prompts. Guidance 1 is a run without guidance. A setting that
the policy refuses is a row with its error.

At every guidance a second policy stands beside it (``list_db``), whose calibration prompts are
twice as many and spread over a list of guidance values.

Writes its rows into ``results/transfer.json``, in place of older rows of the same models. The last
line of standard output is the JSON of the rows, compact.

    python benchmarks/transfer.py                       # every bundled model
    python benchmarks/transfer.py emoji-wan
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policies import calibrated
from rows import RESULTS, ModelParser, Row, mean_row, replace_rows, show_progress

from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.validate import Variant, measure
from ertacache.core.plans import steps_for_speedup
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.solve import profile_of
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUP = 2.0
GUIDANCE = (1.0, 2.0, 3.0, 5.0, 7.0)
LISTED = (2.0, 5.0, 7.0)  # with the model's own, they span all but the runs without guidance
LIST = 2  # times as many calibration prompts for a list of values
BATCHES = (1, 4)
BATCH = 8  # of the calibration, as in the other benchmarks
GRID = 16  # sizes are multiples of it


@dataclass(frozen=True)
class Setting:
    """One setting of a run, and what sets it apart from the calibrated one.

    Attributes:
        varied: ``"guidance"``, ``"size"`` or ``"batch"``.
        guidance: guidance scale; None for a model without.
        size: height and width in pixels.
        batch_size: prompts per call.
    """

    varied: str
    guidance: float | None
    size: tuple[int, int]
    batch_size: int


def other_size(size: tuple[int, int]) -> tuple[int, int]:
    """Three quarters of a size, on the grid; one step more than the size if that is the same."""
    height, width = (GRID * round(0.75 * side / GRID) for side in size)
    return (height, width) if (height, width) != size else (size[0] + GRID, size[1] + GRID)


def settings_of(model: Any, size: tuple[int, int] | None) -> Iterator[Setting]:
    """The settings of a model: each guidance, each size, each batch, the rest as calibrated."""
    home = Setting("guidance", model.guidance, model.size, BATCHES[0])
    if model.guidance is not None:
        for guidance in sorted({*GUIDANCE, model.guidance}):
            yield replace(home, guidance=guidance)
    for shape in (model.size, size or other_size(model.size)):
        yield replace(home, varied="size", size=shape)
    for batch_size in BATCHES:
        yield replace(home, varied="batch", batch_size=batch_size)


def call_of(model: Any, setting: Setting) -> dict[str, Any]:
    """The pipeline's arguments at a setting."""
    height, width = setting.size
    call = model.call_arguments | {"height": height, "width": width}
    if setting.guidance is not None:
        call[model.guidance_argument] = setting.guidance
    return dict(call)


def guidance_list(model: Any) -> list[float]:
    """The guidance values of the second policy, the model's own first."""
    return [model.guidance, *(value for value in LISTED if value != model.guidance)]


def make_policy(pipe: Any, name: str, count: int, guidance: list[float] | None = None) -> Policy:
    """The policy at the model's own setting, or over a list of guidance."""
    model, listed = MODELS[name], "" if guidance is None else " (list)"
    varied = {} if guidance is None else {model.guidance_argument: guidance}
    session = Session(
        pipe,
        model.call_arguments | varied,
        batch_size=BATCH,
        stage=lambda stage: show_progress(f"{name}: {stage}{listed}"),
    )
    runs = session.number_runs(load_prompts(name, "calibration")[:count])
    known = calibrated(session, runs, speedups=[SPEEDUP])
    # The plan of that speed-up comes first; others may be there from other benchmarks.
    schedule = profile_of(known).schedule
    plan = known.find_plan(schedule, steps_for_speedup(schedule.num_steps, SPEEDUP))
    assert plan is not None
    return replace(known, plans=(plan,))


def evaluate(
    pipe: Any, policies: dict[str, Policy], model: Any, setting: Setting, prompts: list[str]
) -> Row:
    """The policies and fewer steps at a setting; an error where a policy refuses."""
    plan = policies["psnr"].default
    steps, computed = plan.num_steps, len(plan.compute_steps)
    variants = {"full": Variant("full", steps, None, steps)}
    for name, policy in policies.items():
        variants[name] = Variant(name, computed, policy, steps)
    variants["fewer"] = Variant("fewer steps", computed, None, computed)
    session = Session(pipe, call_of(model, setting), batch_size=setting.batch_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another setting is intended here
            warnings.filterwarnings("error", message="no plan")  # every step would be computed
            measure(session, [*variants.values()], number_runs(prompts, HELDOUT_SEED))
    except (PolicyError, UserWarning) as error:
        # The error names the folder that the model was loaded from, which is another one elsewhere.
        reason = str(error).replace(str(model.folder), model.name)
        return {"refused": reason, "beats_fewer_steps": False}
    row: Row = {}
    for name, variant in variants.items():
        row |= {} if name == "full" else mean_row(variant.decibels, name)
    return row | {"beats_fewer_steps": row["psnr_db"] > row["fewer_db"]}


def measure_model(name: str, options: argparse.Namespace) -> list[Row]:
    """All rows of a model; a setting in several lists is measured once."""
    pipe, model = load_pipeline(name), MODELS[name]
    policies = {"psnr": make_policy(pipe, name, options.calibration)}
    if model.guidance is not None:
        listed = guidance_list(model)
        policies["list"] = make_policy(pipe, name, LIST * options.calibration, listed)
    prompts = load_prompts(name, "heldout")[: options.heldout]
    known: dict[Setting, Row] = {}
    rows, plan = [], policies["psnr"].default
    for setting in settings_of(model, options.size):
        plain = replace(setting, varied="")
        # Elsewhere the guidance is that of the model, and the first policy is the one for it.
        compared = policies if setting.varied == "guidance" else {"psnr": policies["psnr"]}
        if plain not in known:
            known[plain] = evaluate(pipe, compared, model, setting, prompts)
        height, width = setting.size
        found = known[plain].items()
        row = {
            "model": name,
            "varied": setting.varied,
            "calibrated": plain == Setting("", model.guidance, model.size, BATCHES[0]),
            "guidance": setting.guidance,
            "height": height,
            "width": width,
            "batch_size": setting.batch_size,
            "steps": plan.num_steps,
            "compute_steps": len(plan.compute_steps),
            **{key: v for key, v in found if "list" in compared or not key.startswith("list_")},
            "prompts": len(prompts),
        }
        rows.append(row)
        shown = ("varied", "guidance", "psnr_db", "list_db", "fewer_db")
        print({key: row.get(key) for key in shown})
    return rows


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from a string such as 96x96."""
    height, _, width = text.partition("x")
    return int(height), int(width)


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other, and write their rows."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=32, help="calibration prompts")
    parser.add_argument("--heldout", type=int, default=16, help="held-out prompts")
    parser.add_argument("--size", type=parse_size, metavar="HxW", help="the other size")
    parser.add_argument("--results", type=Path, default=RESULTS / "transfer.json")
    options = parser.parse(arguments)
    rows: list[Row] = []
    for name in options.models:
        fresh = measure_model(name, options)
        replace_rows(options.results, name, fresh)
        rows += fresh
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
