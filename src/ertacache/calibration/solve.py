"""Solving without the pipeline: a plan of either method from the profile in a policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ertacache.core.paper import (
    pick_schedule,
    profile_plan,
    reuse_distances,
    search_profile,
    sweep_profile,
)
from ertacache.core.plans import PaperPlan, Reuse, Target, steps_for_speedup
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile
from ertacache.integration.solve import PlanSolver, profile_of

__all__ = ["Method", "PaperOptions", "check_method", "check_threshold", "solve"]

Method = Literal["trajectory", "paper"]


@dataclass(frozen=True)
class PaperOptions:
    """The parts of the paper's method.

    Attributes:
        reuse: what a reused step returns.
        adjust_timesteps: adjust the sigma schedule.
        rectify: rectify reused outputs.
    """

    reuse: Reuse = "residual"
    adjust_timesteps: bool = True
    rectify: bool = True


def check_method(method: str) -> None:
    """Raise unless there is such a method."""
    if method not in ("trajectory", "paper"):
        raise ValueError(f"method must be 'trajectory' or 'paper', got {method!r}")


def check_threshold(threshold: float, method: Method) -> float:
    """Return the paper's lambda; raise if it is out of range or for the other method."""
    if method != "paper":
        raise ValueError('a threshold is the paper\'s: give method="paper", or a speedup')
    if not 0 <= threshold < math.inf:
        raise ValueError(f"threshold must be a finite number of at least 0, got {threshold:g}")
    return threshold


def solve(
    policy: Policy,
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    min_psnr: float | None = None,
    threshold: float | None = None,
    method: Method = "trajectory",
    reuse: Reuse = "residual",
    adjust_timesteps: bool = True,
    rectify: bool = True,
) -> Policy:
    """Add a plan for the profiled runs to a policy, without the model. Give exactly one target.

    ``attach`` solves by itself; this is to look at a plan, or for one of the paper's method, which
    comes before those of ours, since it is only followed as the default.

    Args:
        policy: a policy with a profile.
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps (the paper's method: at most).
        min_psnr: the fewest computed steps with this predicted PSNR to the full run, in dB.
        threshold: the paper's lambda.
        method: trajectory rectification, or ``"paper"``.
        reuse: the paper's method: what a reused step returns.
        adjust_timesteps: the paper's method: adjust the sigma schedule.
        rectify: the paper's method: rectify reused outputs.
    """
    check_method(method)
    profile, target = profile_of(policy), Target(speedup, compute_steps, min_psnr)
    if (target == Target()) == (threshold is None):
        raise ValueError("give exactly one of speedup, compute_steps, min_psnr and threshold")
    budget = _budget(target, profile.num_steps)
    if method == "paper":
        if min_psnr is not None:
            raise ValueError("the paper's method predicts no error: give a speedup or a threshold")
        options = PaperOptions(reuse, adjust_timesteps, rectify)
        plan = _paper_plan(profile, budget, threshold, options)
        return _with_paper_plan(policy, FittedPlan(plan, profile.schedule.sigmas))
    if threshold is not None:
        check_threshold(threshold, method)
    solver = PlanSolver(policy)
    if min_psnr is not None:
        budget = _reaching(solver, profile, min_psnr)
    assert budget is not None
    solved = solver.solve(profile.schedule, budget)
    if solved is None:
        raise PolicyError(f"no plan with {budget} computed steps is better than plain reuse")
    return policy.with_plan(solved)


def _with_paper_plan(policy: Policy, plan: FittedPlan) -> Policy:
    """The policy with a plan of the paper's method, ahead of plans of other methods."""
    found = policy.with_plan(plan).plans
    ordered = sorted(found, key=lambda each: each.method != plan.method)
    return replace(policy, plans=tuple(ordered))


def _budget(target: Target, num_steps: int) -> int | None:
    """The number of computed steps of a target; unlike that of a run, it is not cut to size."""
    if target.speedup is not None:
        return steps_for_speedup(num_steps, target.speedup)
    if target.compute_steps is not None and not 2 <= target.compute_steps <= num_steps:
        raise ValueError(f"cannot compute {target.compute_steps} of {num_steps} steps")
    return target.compute_steps


def _reaching(solver: PlanSolver, profile: Profile, psnr: float) -> int:
    curve = solver.curve(profile.schedule)
    for computed, error in sorted(curve.items()):
        if solver.psnr(error) >= psnr:
            return computed
    best = solver.psnr(min(curve.values()))
    raise ValueError(f"no plan is predicted to reach {psnr:g} dB; the best is {best:.1f} dB")


def _paper_plan(
    profile: Profile, budget: int | None, threshold: float | None, options: PaperOptions
) -> PaperPlan:
    distances = reuse_distances(profile.statistics, options.reuse)
    if threshold is not None:
        steps = search_profile(*distances, threshold=check_threshold(threshold, "paper"))
    else:
        assert budget is not None
        _, steps = pick_schedule(sweep_profile(*distances), budget)
    return profile_plan(
        profile.statistics,
        profile.schedule.sigmas,
        compute_steps=steps,
        reuse=options.reuse,
        adjust_timesteps=options.adjust_timesteps,
        rectify=options.rectify,
    )
