"""The paper's calibration on the network: its policy search, then phi, K and B in runs under it.

``solve`` takes every output for the reference run's and needs no network. Here the network is asked
on every step of accelerated runs, as Algorithm 2 and the closed forms are printed. Knows no other
method and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ertacache.calibration.counting import Count
from ertacache.calibration.profiling import Progress, generators
from ertacache.calibration.solving import Wish, make_policy, paper_distances
from ertacache.core.plan import PaperPlan, Reuse
from ertacache.core.rectify import RectifyMode
from ertacache.core.threshold import pick_schedule, sweep_profile
from ertacache.core.timesteps import adjusted_sigmas
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.compat import Pipeline
from ertacache.integration.walk import Search, Walk, fit_gain_run, search_run

__all__ = ["PASSES", "calibrate_paper", "fit_paper_plan", "make_walk", "search_schedule"]

PASSES = 6
"""Thresholds that are tried for a number of computed steps; most need two or three."""

_MORE = 12  # if all of them computed too many steps


def calibrate_paper(
    pipe: Pipeline,
    profile: Profile,
    runs: Sequence[ProfiledPrompt],
    *,
    wish: Wish,
    call: dict[str, Any],
    batch_size: int | None = None,
    progress: Progress | None = None,
    count: Count | None = None,
) -> Policy:
    """A policy of the paper's method, calibrated in runs of the pipeline.

    One run of all prompts per threshold that is tried, in which phi is measured too, and one run on
    the adjusted table to fit K and B; the network is asked on all T steps of each.

    Args:
        pipe: the pipeline, nothing attached.
        profile: the untouched runs; ``runs`` are among them.
        runs: calibration prompts and seeds.
        wish: threshold, or number of computed steps; and the options of the method.
        call: arguments of the pipeline, without prompts and generators.
        batch_size: prompts per call of the network; None is all at once.
        progress: called with the runs done and the most that there can be.
        count: told how often the network was asked.
    """
    walk = make_walk(profile, runs, reuse=wish.reuse, call=call, batch_size=batch_size, count=count)
    tell = progress or (lambda done, runs: None)
    if wish.threshold is not None:
        found = search_run(pipe, walk, threshold=wish.threshold)
    else:
        found = search_schedule(
            pipe,
            walk,
            profile,
            budget=_budget(profile, wish),
            progress=lambda done: tell(done, PASSES + 1),
        )
    plan = fit_paper_plan(
        pipe, walk, found, adjust_timesteps=wish.adjust_timesteps, rectify=wish.rectify
    )
    tell(PASSES + 1, PASSES + 1)
    origin = {"paper": "calibrated on the network", "threshold": f"{found.threshold:.6g}"}
    return make_policy(profile, plan, embed=profile, provenance=origin)


def make_walk(
    profile: Profile,
    runs: Sequence[ProfiledPrompt],
    *,
    call: dict[str, Any],
    reuse: Reuse = "residual",
    batch_size: int | None = None,
    count: Count | None = None,
) -> Walk:
    """Where the calibration runs of some prompts go."""
    steps = tuple(range(profile.num_steps))
    policy = make_policy(profile, PaperPlan(steps, reuse, profile.sigmas))
    _, norms = paper_distances(profile, reuse)
    texts = [run.prompt for run in runs]
    return Walk(
        policy,
        reuse,
        norms[[profile.prompts.index(run) for run in runs]].mean(0),
        prompts=len(runs),
        arguments=lambda: call | {"prompt": texts, "generator": generators(runs)},
        batch_size=batch_size,
        count=count,
    )


def search_schedule(
    pipe: Pipeline,
    walk: Walk,
    profile: Profile,
    *,
    budget: int,
    progress: Callable[[int], None] | None = None,
) -> Search:
    """The policy search of Algorithm 2 for a number of computed steps, or the most below it.

    Begins with the threshold that the profile suggests. A run that computes d steps too many (or
    too few) moves the threshold past the d-th smallest error of its computed (largest of its
    reused) steps, within what earlier runs have left open. Ends with the first run that hits the
    number, or after ``PASSES`` runs with the nearest below it; while there is none below, larger
    and larger thresholds follow.
    """
    threshold, _ = pick_schedule(sweep_profile(*paper_distances(profile, walk.reuse)), budget)
    low, high, best = 0.0, math.inf, None
    for done in range(1, PASSES + _MORE + 1):
        found = search_run(pipe, walk, threshold=threshold)
        if progress is not None:
            progress(min(done, PASSES))
        surplus = len(found.compute_steps) - budget
        if surplus <= 0 and (best is None or len(found.compute_steps) > len(best.compute_steps)):
            best = found
        if surplus == 0 or (best is not None and done >= PASSES):
            break
        low, high = (threshold, high) if surplus > 0 else (low, threshold)
        threshold = _next_threshold(found, surplus, low, high) if done < PASSES else 1.2 * low
    return best or search_run(pipe, walk, threshold=math.inf)


def _next_threshold(found: Search, surplus: int, low: float, high: float) -> float:
    """A threshold strictly between ``low`` (too many steps) and ``high`` (too few)."""
    computed = set(found.compute_steps)
    errors: list[float] = found.errors.tolist()
    if surplus > 0:
        ranked = sorted(e for k, e in enumerate(errors) if k in computed and e > 0)
        guess = math.nextafter(ranked[min(surplus, len(ranked)) - 1], math.inf) if ranked else low
    else:
        ranked = sorted((e for k, e in enumerate(errors) if k not in computed), reverse=True)
        guess = ranked[min(-surplus, len(ranked)) - 1] if ranked else high
    if low < guess < high:
        return guess
    return 2 * low if math.isinf(high) else (low + high) / 2


def fit_paper_plan(
    pipe: Pipeline,
    walk: Walk,
    found: Search,
    *,
    adjust_timesteps: bool = True,
    rectify: bool = True,
    mode: RectifyMode = "scalar",
) -> PaperPlan:
    """The plan of a schedule that was searched: its table from phi, K and B from one more run."""
    sigmas: Tensor = walk.policy.sigmas
    if adjust_timesteps:
        sigmas = adjusted_sigmas(sigmas, found.step_scales)
    plan = PaperPlan(found.compute_steps, walk.reuse, sigmas)
    if not rectify or len(found.compute_steps) == plan.num_steps:
        return plan
    gain, bias = fit_gain_run(pipe, walk, plan=plan, mode=mode)
    return PaperPlan(plan.compute_steps, plan.reuse, plan.sigmas, gain, bias)


def _budget(profile: Profile, wish: Wish) -> int:
    budget = wish.budget(profile.num_steps)
    if budget is None or not 2 <= budget <= profile.num_steps:
        raise ValueError(f"cannot compute {budget} of {profile.num_steps} steps")
    return budget
