"""How long a run waits for its plan when its schedule is new, and when it is not; on one core.

What it measures: seconds that the choice of a plan takes at the start of a run, for a policy with a
profile of 32 prompts of a bundled model at its own number of steps, on sigma schedules that were
not profiled (another shift): read off the scheduler, resampled, searched and fitted, with one
group, with as many groups as a policy can have, and with a response of the network, whatever it is.
Then the same for a second run on that schedule. Medians over repeated first runs, each with a fresh
chooser, after one that is not counted. And how good what was found so quickly is: its predicted
error over that of a search of all budgets on the new schedule, in dB; above 0 it is worse.

Writes its rows into ``results/solving.json``. The last line of standard output is the JSON of the
rows, compact.

    python benchmarks/solving.py                     # emoji-wan, 50 steps
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rows import RESULTS, Row, replace_rows, show_progress

from ertacache.calibration.profile import profile_runs
from ertacache.calibration.session import Session, number_runs
from ertacache.core.frontier import Frontier, MeasuredFit, solve_frontier
from ertacache.core.gram import Schedule
from ertacache.core.groups import ONE_GROUP
from ertacache.core.plans import Target
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy
from ertacache.integration.choose import PlanChooser
from ertacache.integration.schedulers import read_schedule
from ertacache.integration.solve import PlanSolver, profile_of, with_frontier
from ertacache.models import MODELS, load_pipeline, load_prompts

SPEEDUPS = (2.0, 3.0, 5.0)
SLOPE = 0.5
SHIFT = {"flow_shift": 5.0, "shift": 5.0}  # of the new schedule, by the scheduler's own name


def profiled(name: str, pipe: Any, prompts: int) -> Policy:
    """A policy with a profile and its frontier; nothing is tried on the network."""
    session = Session(
        pipe,
        MODELS[name].call_arguments,
        batch_size=8,
        stage=lambda stage: show_progress(f"{name}: {stage}"),
    )
    runs = number_runs(load_prompts(name, "calibration")[:prompts])
    return with_frontier(profile_runs(session, runs, keep=runs))


def with_fit(policy: Policy, fit: Fit) -> Policy:
    """The policy, with all plans fitted in one way; its response matters for nothing but time."""
    response = (SLOPE,) * profile_of(policy).num_steps
    return replace(policy, fits=(MeasuredFit(1, fit, 1.0),), response=response)


def new_schedule(pipe: Any, steps: int) -> Any:
    """A scheduler of the same class with another shift, after ``set_timesteps``."""
    config = pipe.scheduler.config
    shift = {key: value for key, value in SHIFT.items() if key in config}
    scheduler = type(pipe.scheduler).from_config(config, **shift)
    scheduler.set_timesteps(steps)
    return scheduler


def timed(policy: Policy, scheduler: Any, target: Target) -> tuple[float, float]:
    """Seconds of the first choice of a plan and of the second."""
    chooser, seconds = PlanChooser(policy, target), []
    for _ in range(2):
        begin = time.perf_counter()
        chooser.choose(scheduler)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]


def whole_frontier(policy: Policy, schedule: Schedule) -> Frontier:
    """The frontier of a schedule, searched for every budget from nothing."""
    profile, solver = profile_of(policy), PlanSolver(policy)
    return solve_frontier(
        profile.run_grams(schedule),
        schedule.nominal,
        measured=solver.fits(schedule),
        pinned=solver.pinned(schedule),
        by_group=partial(profile.gram, run=schedule),
        response=solver.response(schedule),
    )


def behind(policy: Policy, schedule: Schedule, whole: Frontier, budget: int) -> float:
    """Decibels that a budget solved alone is behind its point on the whole frontier."""
    solved = PlanSolver(policy).solve(schedule, budget)
    assert solved is not None
    assert solved.predicted_error is not None
    return 20 * math.log10(solved.predicted_error / whole.point(budget).predicted_error)


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a model."""
    pipe = load_pipeline(name)
    policy, steps = profiled(name, pipe, options.prompts), MODELS[name].num_inference_steps
    scheduler = new_schedule(pipe, steps)
    rows = []
    finest = profile_of(policy).finest or ONE_GROUP
    schedule = read_schedule(scheduler)
    for fit in (Fit(), Fit(groups=finest), Fit(response=True)):
        fitted = with_fit(policy, fit)
        whole = whole_frontier(fitted, schedule)
        for speedup in SPEEDUPS:
            target = Target(speedup=speedup)
            budget = target.budget(steps)
            assert budget is not None
            times = [timed(fitted, scheduler, target) for _ in range(options.repeats + 1)][1:]
            first, second = ([time[place] for time in times] for place in range(2))
            rows.append(
                {
                    "model": name,
                    "steps": steps,
                    "compute_steps": budget,
                    "groups": str(fit.groups),
                    "response": fit.response,
                    "prompts": options.prompts,
                    "first_ms": round(1e3 * median(first), 1),
                    "fastest_ms": round(1e3 * min(first), 1),
                    "slowest_ms": round(1e3 * max(first), 1),
                    "second_ms": round(1e3 * median(second), 3),
                    "behind_frontier_db": round(behind(fitted, schedule, whole, budget), 2),
                    "repeats": options.repeats,
                    "threads": torch.get_num_threads(),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="emoji-wan", choices=sorted(MODELS))
    parser.add_argument("--prompts", type=int, default=32, help="profiled prompts")
    parser.add_argument("--repeats", type=int, default=15, help="counted first runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "solving.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = measure(options.model, options)
    replace_rows(options.results, options.model, rows)
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
