"""Whether one profile serves other schedules: steps, shifts, sizes, schedulers, later starts.

One profile per bundled model, at its own steps, with the fits that trials found there. Then one
thing at a time is changed, and at half and a third of the steps computed four ways to run are
compared with the full run at the same setting, on held-out prompts: PSNR of the decoded result,
with a bootstrap interval over prompts.

- ``resampled``: the plan that ``attach`` solves from that profile when the run starts;
- ``own``: a plan solved from a profile of the setting itself, with the same fits, scaled to it;
- ``refit``: that plan, refitted in closed loop at the setting;
- ``fewer``: as many steps as the plans compute. For image to image with the same strength.

Settings: 0.5, 0.67, 0.8, 1.33 and 1.67 times as many steps; two other shifts; for emoji-opensora,
whose shift follows the size, another size; another scheduler class; image to image (video to video)
at strength 0.6, from a result of the model itself. A setting that a model does not have is left
out.

Writes its rows into ``results/schedules.json``, after each setting; with ``--resume`` settings that
are there are not measured again. The last line of standard output is the JSON of the rows, compact.

    python benchmarks/schedules.py                       # every bundled model
    python benchmarks/schedules.py emoji-wan --resume
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from policies import calibrated
from rows import RESULTS, ModelParser, Row, mean_row, read_rows, replace_rows, show_progress

from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import refit_budget
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.calibration.validate import Variant, measure
from ertacache.core.plans import Target
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.integration.solve import PlanSolver, profile_frontier
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUPS = (2.0, 3.0)
STEPS = (0.5, 0.67, 0.8, 1.33, 1.67)
STRENGTH = 0.6
BATCH = 8  # of the calibration, as in the other benchmarks
NEAR = 3  # budgets more and less that the search of an own frontier covers
SHIFTS: dict[str, tuple[str, tuple[float, float]]] = {
    "emoji-flux": ("shift", (1.5, 6.0)),
    "emoji-wan": ("flow_shift", (1.5, 6.0)),
    "emoji-cogvideox": ("snr_shift_scale", (0.5, 2.0)),
    "emoji-opensora": ("transform_scale", (0.5, 2.0)),
}
SIZES = {"emoji-opensora": (48, 48)}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "emoji-flux": lambda old: diffusers.UniPCMultistepScheduler(**FLOW),
    "emoji-wan": lambda old: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "emoji-cogvideox": lambda old: diffusers.DPMSolverMultistepScheduler.from_config(old.config),
}
FROM_IMAGES: dict[str, tuple[str, str]] = {
    "emoji-flux": ("FluxImg2ImgPipeline", "image"),
    "emoji-wan": ("WanVideoToVideoPipeline", "video"),
    "emoji-cogvideox": ("CogVideoXVideoToVideoPipeline", "video"),
}


@dataclass(frozen=True, eq=False)
class Setting:
    """One way to call a pipeline.

    Attributes:
        varied: what sets it apart: ``"steps"``, ``"shift"``, ``"size"``, ``"scheduler"`` or
            ``"strength"``.
        value: its value.
        pipe: the pipeline.
        call: its arguments.
        strength: share of the steps that is run.
    """

    varied: str
    value: Any
    pipe: Any
    call: dict[str, Any] = field(default_factory=dict)
    strength: float = 1.0

    def fewer(self, computed: int) -> int:
        """Number of inference steps that computes so many."""
        return math.ceil(computed / self.strength - 1e-9)


def settings_of(name: str, pipe: Any) -> Iterator[Setting]:
    """The settings of a model; those that need another pipeline share its networks."""
    model = MODELS[name]
    call, own = dict(model.call_arguments), pipe.scheduler
    for factor in STEPS:
        steps = round(factor * model.num_inference_steps)
        yield Setting("steps", steps, pipe, call | {"num_inference_steps": steps})
    key, shifts = SHIFTS[name]
    for shift in shifts:
        pipe.scheduler = type(own).from_config(own.config, **{key: shift})
        yield Setting("shift", f"{key}={shift:g}", pipe, call)
    pipe.scheduler = own
    if name in SIZES:
        height, width = SIZES[name]
        yield Setting("size", f"{height}x{width}", pipe, call | {"height": height, "width": width})
    if name in SCHEDULERS:
        pipe.scheduler = SCHEDULERS[name](own)
        yield Setting("scheduler", type(pipe.scheduler).__name__, pipe, call)
        pipe.scheduler = own
    if name in FROM_IMAGES:
        yield from _from_image(name, pipe, call)


def _from_image(name: str, pipe: Any, call: dict[str, Any]) -> Iterator[Setting]:
    kind, argument = FROM_IMAGES[name]
    noise = torch.Generator("cpu").manual_seed(HELDOUT_SEED - 1)
    prompt = load_prompts(name, "calibration")[-1]
    start = pipe(prompt=prompt, generator=noise, output_type="pil", **call)[0][0]
    other = _starting(getattr(diffusers, kind), argument, start, pipe.components)
    call = call | {"strength": STRENGTH}
    if argument == "video":
        call.pop("num_frames")
    yield Setting("strength", STRENGTH, other, call, STRENGTH)


def _starting(kind: Any, argument: str, start: Any, parts: dict[str, Any]) -> Any:
    """A pipeline of a class, called with the same image, or video, for every prompt."""

    class Starting(kind):  # type: ignore[misc]
        def __call__(self, prompt: str | list[str], **call: Any) -> Any:
            count = 1 if isinstance(prompt, str) else len(prompt)
            return super().__call__(prompt=prompt, **{argument: [start] * count}, **call)

    taken = inspect.signature(kind.__init__).parameters
    made = Starting(**{key: part for key, part in parts.items() if key in taken})
    made.set_progress_bar_config(disable=True)
    return made


def own_plans(
    session: Session, policy: Policy, setting: Setting, options: argparse.Namespace, name: str
) -> Iterator[tuple[int, FittedPlan, FittedPlan]]:
    """Budgets of a setting, each with a plan from its own profile, solved and refitted.

    Where none is predicted to be better than plain reuse, plain reuse.
    """
    runs = number_runs(load_prompts(name, "calibration")[: options.calibration])
    known = profile_runs(session, runs, keep=runs)
    profile = known.profile
    assert profile is not None
    solver = PlanSolver(policy)
    scaled = {max(1, round(f.computed)): f for f in solver.fits(profile.schedule)}
    fits = tuple(replace(fit, computed=count) for count, fit in scaled.items())
    found = solver.response(profile.schedule)
    response = () if found is None else tuple(found.tolist())
    known = replace(known, fits=fits, unit_psnr=policy.unit_psnr, response=response)
    for speedup in SPEEDUPS:
        computed = Target(speedup=speedup).budget(profile.num_steps)
        assert computed is not None
        near = range(max(2, computed - NEAR), min(profile.num_steps, computed + NEAR) + 1)
        mine = replace(known, frontier=profile_frontier(known, budgets=near).known)
        solver = PlanSolver(mine)
        solved = solver.solve(profile.schedule, computed) or solver.plain(
            profile.schedule, computed
        )
        reference = session.reference(runs[: options.refit_prompts])
        yield computed, solved, refit_budget(session, mine, reference, computed)


def evaluate(name: str, policy: Policy, setting: Setting, options: argparse.Namespace) -> list[Row]:
    """The rows of a setting."""
    began = time.perf_counter()
    session = Session(
        setting.pipe,
        setting.call,
        batch_size=options.batch,
        stage=lambda stage: show_progress(f"{name}, {setting.varied} {setting.value}: {stage}"),
    )
    steps = setting.call["num_inference_steps"]
    variants, plans = [Variant("full", steps, None, steps)], []
    for computed, solved, refitted in own_plans(session, policy, setting, options, name):
        plans.append((computed, solved.num_steps))
        own, refit = (Policy(policy.fingerprint, plans=(p,)) for p in (solved, refitted))
        target = Target(compute_steps=computed)
        variants += [
            Variant("resampled", computed, policy, steps, target),
            Variant("own", computed, own, steps),
            Variant("refit", computed, refit, steps),
            Variant("fewer", computed, None, setting.fewer(computed)),
        ]
    heldout = number_runs(load_prompts(name, "heldout")[: options.heldout], HELDOUT_SEED)
    measure(session, variants, heldout)
    rows = []
    for place, (computed, taken) in enumerate(plans):
        four = variants[1 + 4 * place : 5 + 4 * place]
        figures: Row = {}
        for variant in four:
            figures |= mean_row(variant.decibels, variant.name)
        rows.append(
            {
                "model": name,
                "varied": setting.varied,
                "value": setting.value,
                "steps": taken,
                "compute_steps": computed,
                **figures,
                "prompts": len(heldout),
                "calibration": options.calibration,
                "refit_prompts": options.refit_prompts,
            }
        )
        print({key: value for key, value in rows[-1].items() if not key.endswith(("low", "high"))})
    print(f"took {time.perf_counter() - began:.0f} s", flush=True)
    return rows


def own_policy(name: str, pipe: Any, options: argparse.Namespace) -> Policy:
    """The policy of a model at its own setting, without any plan."""
    session = Session(
        pipe,
        MODELS[name].call_arguments,
        batch_size=BATCH,
        stage=lambda stage: show_progress(f"{name}: {stage}"),
    )
    runs = number_runs(load_prompts(name, "calibration")[: options.calibration])
    return replace(calibrated(session, runs), plans=())


def measure_model(name: str, options: argparse.Namespace) -> list[Row]:
    """All rows of a model, written as they come."""
    pipe = load_pipeline(name)
    policy = own_policy(name, pipe, options)
    old = [row for row in read_rows(options.results) if row["model"] == name]
    rows = old if options.resume or options.varied else []
    if options.varied and not options.resume:
        rows = [row for row in old if row["varied"] not in options.varied]
    for setting in settings_of(name, pipe):
        if options.varied and setting.varied not in options.varied:
            continue
        if any((row["varied"], row["value"]) == (setting.varied, setting.value) for row in rows):
            continue
        rows += evaluate(name, policy, setting, options)
        replace_rows(options.results, name, rows)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other, and write their rows."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=32, help="calibration prompts")
    parser.add_argument("--refit-prompts", type=int, default=16, help="prompts of a refit")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts")
    parser.add_argument("--batch", type=int, default=16, help="prompts per call")
    parser.add_argument("--varied", nargs="+", help="only settings that vary these")
    parser.add_argument("--resume", action="store_true", help="keep the settings that are there")
    parser.add_argument("--results", type=Path, default=RESULTS / "schedules.json")
    options = parser.parse(arguments)
    rows: list[Row] = []
    for name in options.models:
        rows += measure_model(name, options)
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
