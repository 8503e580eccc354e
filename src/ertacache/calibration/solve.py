"""Solving: a policy for any target from a saved profile, without the pipeline.

The solver predicts the distance of the final latent to that of the full run, root mean square; a
target PSNR is about decoded images. For small errors a decoder is a linear map, so one number
relates the two:

    PSNR(error) = unit - 20 log10(error)        unit: the PSNR of a latent error of 1

``calibrate`` measures the unit in a trial run; here it is guessed from the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import ertacache
from ertacache.core.frontier import Frontier, FrontierPoint, solve_frontier
from ertacache.core.paper import (
    pick_schedule,
    profile_plan,
    reuse_distances,
    search_profile,
    sweep_profile,
)
from ertacache.core.plans import PaperPlan, Reuse, TrajectoryPlan, steps_for_speedup
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile

__all__ = [
    "TARGETS",
    "Method",
    "PaperOptions",
    "Target",
    "choose_point",
    "error_of",
    "guess_unit",
    "make_policy",
    "measured_unit",
    "predicted_psnr",
    "solve",
    "solve_profile",
]

Method = Literal["trajectory", "paper"]
TARGETS = ("speedup", "compute_steps", "max_error", "min_psnr", "threshold")

PIXEL_SPREAD = 0.25  # standard deviation of images with values from 0 to 1, roughly
TINY = 1e-12  # an error below it is none


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


@dataclass(frozen=True)
class Target:
    """What a policy has to reach; exactly one of the first five is set.

    Attributes:
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps (the paper's method: at most).
        max_error: the fewest computed steps with a predicted error of the final latent within it;
            ``"trajectory"`` only.
        min_psnr: the fewest computed steps with this PSNR to the full run, in dB;
            ``"trajectory"`` only.
        threshold: the paper's lambda; ``"paper"`` only.
        method: trajectory rectification, or the paper's method.
    """

    speedup: float | None = None
    compute_steps: int | None = None
    max_error: float | None = None
    min_psnr: float | None = None
    threshold: float | None = None
    method: Method = "trajectory"

    def __post_init__(self) -> None:
        """Check that exactly one target is set, and that the method supports it."""
        if sum(getattr(self, name) is not None for name in TARGETS) != 1:
            raise ValueError(f"give exactly one of {', '.join(TARGETS[:-1])} and {TARGETS[-1]}")
        if self.method not in ("trajectory", "paper"):
            raise ValueError(f"method must be 'trajectory' or 'paper', got {self.method!r}")
        predicting = self.max_error is not None or self.min_psnr is not None
        if self.method == "paper" and predicting:
            raise ValueError("the paper's method predicts no error: give a speedup or a threshold")
        if self.method != "paper" and self.threshold is not None:
            raise ValueError('a threshold is the paper\'s: give method="paper", or a speedup')

    def budget(self, num_steps: int) -> int | None:
        """The number of computed steps, None if the target is another.

        Example:
            >>> Target(speedup=2.8).budget(30)
            10
        """
        if self.speedup is None:
            return self.compute_steps
        return steps_for_speedup(num_steps, self.speedup)


def solve(
    profile: Profile,
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    max_error: float | None = None,
    min_psnr: float | None = None,
    threshold: float | None = None,
    method: Method = "trajectory",
    reuse: Reuse = "residual",
    adjust_timesteps: bool = True,
    rectify: bool = True,
    pinned: Iterable[int] = (),
    embed_profile: bool = True,
) -> Policy:
    """Solve a policy from a profile, without the model. Give exactly one target.

    Args:
        profile: the profile.
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps (the paper's method: at most).
        max_error: the fewest computed steps with a predicted error of the final latent within it.
        min_psnr: the fewest computed steps with this predicted PSNR to the full run, in dB; without
            the network the prediction is some dB off.
        threshold: the paper's lambda.
        method: trajectory rectification, or ``"paper"``.
        reuse: the paper's method: what a reused step returns.
        adjust_timesteps: the paper's method: adjust the sigma schedule.
        rectify: the paper's method: rectify reused outputs.
        pinned: steps that must be computed; trajectory rectification only.
        embed_profile: keep the profile in the policy, so that it can be solved again.
    """
    target = Target(speedup, compute_steps, max_error, min_psnr, threshold, method)
    options = PaperOptions(reuse, adjust_timesteps, rectify)
    kept = profile if embed_profile else None
    if target.method == "paper":
        return make_policy(profile, _paper_plan(profile, target, options), embed=kept)
    point = _choose(profile, target, pinned)
    return make_policy(profile, point.plan, embed=kept, predicted_error=point.predicted_error)


def _choose(profile: Profile, target: Target, pinned: Iterable[int]) -> FrontierPoint:
    budget = target.budget(profile.num_steps)
    if budget is not None:
        return solve_profile(profile, budgets=[budget], pinned=pinned).point(budget)
    frontier = solve_profile(profile, pinned=pinned)
    if target.max_error is not None:
        return frontier.within(target.max_error)
    assert target.min_psnr is not None
    return _reaching(frontier, target.min_psnr, guess_unit(profile))


def _reaching(frontier: Frontier, psnr: float, unit: float) -> FrontierPoint:
    limit, best = error_of(psnr, unit), min(p.predicted_error for p in frontier.points)
    if best > limit:
        raise ValueError(
            f"no plan is predicted to reach {psnr:g} dB; the best is "
            f"{predicted_psnr(best, unit):.1f} dB"
        )
    return frontier.within(limit)


def _paper_plan(profile: Profile, target: Target, options: PaperOptions) -> PaperPlan:
    budget = target.budget(profile.num_steps)
    distances = reuse_distances(profile.statistics, options.reuse)
    if target.threshold is not None:
        steps = search_profile(*distances, threshold=target.threshold)
    elif budget is None or budget > profile.num_steps:
        raise ValueError(f"cannot compute {budget} of {profile.num_steps} steps")
    else:
        _, steps = pick_schedule(sweep_profile(*distances), budget)
    return profile_plan(
        profile.statistics,
        profile.sigmas,
        compute_steps=steps,
        reuse=options.reuse,
        adjust_timesteps=options.adjust_timesteps,
        rectify=options.rectify,
    )


def solve_profile(
    profile: Profile,
    *,
    budgets: Iterable[int] | None = None,
    pinned: Iterable[int] = (),
    fit: Fit | None = None,
) -> Frontier:
    """The frontier of a profile, its search started from the paper's compute schedules as well.

    Besides ``pinned``, the first step of every network is computed.
    """
    statistics = profile.statistics
    lambdas = sweep_profile(*reuse_distances(statistics, "residual"))
    return solve_frontier(
        statistics,
        profile.nominal,
        budgets=budgets,
        pinned={*pinned, *profile.expert_steps},
        starts=sorted(set(lambdas.values())),
        fit=fit,
    )


def make_policy(
    profile: Profile,
    plan: TrajectoryPlan | PaperPlan,
    *,
    embed: Profile | None = None,
    predicted_error: float | None = None,
    target_psnr: float | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Policy:
    """A policy for the run that was profiled."""
    origin = {"ertacache": ertacache.__version__, "prompts": str(profile.num_prompts)}
    return Policy(
        plan,
        profile.sigmas,
        fingerprint=profile.fingerprint,
        predicted_error=predicted_error,
        target_psnr=target_psnr,
        expert_steps=profile.expert_steps,
        provenance=origin | dict(provenance or {}),
        profile=embed,
    )


def predicted_psnr(error: float, unit: float) -> float:
    """The PSNR of a final latent that is ``error`` off.

    Example:
        >>> predicted_psnr(0.01, unit=12.0)
        52.0
    """
    return unit - 20 * math.log10(max(error, TINY))


def error_of(psnr: float, unit: float) -> float:
    """The latent error at which a PSNR is reached; undoes ``predicted_psnr``.

    Example:
        >>> round(error_of(52.0, unit=12.0), 6)
        0.01
    """
    return float(10 ** ((unit - psnr) / 20))


def measured_unit(psnr: float, error: float) -> float:
    """The unit, from a measured PSNR and the error that was predicted for it.

    Example:
        >>> measured_unit(52.0, 0.01)
        12.0
    """
    return psnr + 20 * math.log10(max(error, TINY))


def guess_unit(profile: Profile) -> float:
    """The unit of an unknown decoder: an error is the same share of the spread in both spaces.

    That is, an error of a tenth of the latents' spread is taken for a tenth of the pixels' spread,
    a quarter of their range. Decoders of real models are some decibels off.
    """
    return 20 * math.log10(max(profile.statistics.final_spread, TINY) / PIXEL_SPREAD)


def choose_point(
    frontier: Frontier, psnr: float, *, unit: float, above: int = 0
) -> FrontierPoint | None:
    """The fewest computed steps, more than ``above``, that are predicted to reach a PSNR.

    If none are, those with the lowest predicted error; None if there are none above ``above``.
    Computing every step is no policy and is left out.
    """
    points = [point for point in frontier.points if above < point.computed < point.plan.num_steps]
    for point in points:
        if predicted_psnr(point.predicted_error, unit) >= psnr:
            return point
    return min(points, key=lambda point: point.predicted_error, default=None)
