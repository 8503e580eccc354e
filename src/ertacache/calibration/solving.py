"""Solving: a policy for any wish from a saved profile, without the pipeline.

Knows both methods and the profile; never loads or runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

import ertacache
from ertacache.calibration.quality import error_of, guess_unit, predicted_psnr
from ertacache.core.frontier import Frontier, solve_frontier
from ertacache.core.plan import PaperPlan, Reuse, TrajectoryPlan
from ertacache.core.rectify import profile_rectification
from ertacache.core.solve import Fit
from ertacache.core.threshold import pick_schedule, search_profile, sweep_profile
from ertacache.core.timesteps import adjusted_sigmas, profile_step_scales
from ertacache.formats.firststeps import note_first_steps, read_first_steps
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile

__all__ = ["WISHES", "Method", "Wish", "make_policy", "paper_distances", "solve", "solve_all"]

Method = Literal["trajectory", "paper"]
WISHES = ("speedup", "compute_steps", "max_error", "min_psnr", "threshold")


@dataclass(frozen=True)
class Wish:
    """What a policy is to be; exactly one of the first five is given.

    Attributes:
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps (the paper's method: at most).
        max_error: the fewest computed steps expected to stay within this distance of the final
            latent; ``"trajectory"`` only.
        min_psnr: the fewest computed steps expected to come this near to the full run, in dB;
            ``"trajectory"`` only.
        threshold: the paper's lambda; ``"paper"`` only.
        method: trajectory rectification, or the paper's method.
        reuse: what a reused step returns; ``"paper"`` only, like the rest.
        adjust_timesteps: adjust the sigma table.
        rectify: rectify reused outputs.
    """

    speedup: float | None = None
    compute_steps: int | None = None
    max_error: float | None = None
    min_psnr: float | None = None
    threshold: float | None = None
    method: Method = "trajectory"
    reuse: Reuse = "residual"
    adjust_timesteps: bool = True
    rectify: bool = True

    def __post_init__(self) -> None:
        """Check that one thing is wished for, and that the method can grant it."""
        given = [getattr(self, name) for name in WISHES]
        if sum(wish is not None for wish in given) != 1:
            raise ValueError(f"give exactly one of {', '.join(WISHES[:-1])} and {WISHES[-1]}")
        if self.method not in ("trajectory", "paper"):
            raise ValueError(f"method must be 'trajectory' or 'paper', got {self.method!r}")
        expecting = self.max_error is not None or self.min_psnr is not None
        if self.method == "paper" and expecting:
            raise ValueError("the paper's method predicts no error: give a speedup or a threshold")
        if self.method != "paper" and self.threshold is not None:
            raise ValueError('a threshold is the paper\'s: give method="paper", or a speedup')

    def budget(self, num_steps: int) -> int | None:
        """The number of computed steps, None if something else is wished for.

        Example:
            >>> Wish(speedup=2.8).budget(30)
            10
        """
        if self.speedup is None:
            return self.compute_steps
        if not 1 <= self.speedup <= num_steps / 2:
            raise ValueError(
                f"speedup must be between 1 and {num_steps / 2:g}, got {self.speedup:g}"
            )
        return math.floor(num_steps / self.speedup + 1e-9)


def solve(
    profile: Profile,
    *,
    pinned: Iterable[int] = (),
    embed_profile: bool = True,
    unit_psnr: float | None = None,
    **wish: Any,
) -> Policy:
    """Make a policy from a profile, without the model.

    Args:
        profile: the profile.
        pinned: steps that must be computed; trajectory rectification only.
        embed_profile: keep the profile in the policy, so that it can be solved again.
        unit_psnr: the PSNR of a latent error of 1, for ``min_psnr``; ``calibrate`` measures it and
            notes it in its policy. By default it is guessed from the profile, some dB off.
        **wish: the fields of ``Wish``: one of ``speedup``, ``compute_steps``, ``max_error``,
            ``min_psnr`` and ``threshold``; ``method``; and the options of the paper's method.
    """
    wanted = Wish(**wish)
    budget = wanted.budget(profile.num_steps)
    kept = profile if embed_profile else None
    if wanted.method == "paper":
        steps = _threshold_steps(profile, wanted, budget)
        return make_policy(profile, _paper_plan(profile, steps, wanted), embed=kept)
    budgets = None if budget is None else [budget]
    frontier = solve_all(profile, budgets=budgets, pinned=pinned)
    limit = wanted.max_error
    if wanted.min_psnr is not None:
        unit = guess_unit(profile) if unit_psnr is None else unit_psnr
        limit = _error_within(frontier, wanted.min_psnr, unit)
    point = frontier.select(compute_steps=budget, max_error=limit)
    return make_policy(profile, point.plan, embed=kept, predicted_error=point.predicted_error)


def _error_within(frontier: Frontier, psnr: float, unit: float) -> float:
    """The latent error that a PSNR allows; raises if no plan is expected to stay within it."""
    limit, best = error_of(psnr, unit), min(p.predicted_error for p in frontier.points)
    if best > limit:
        raise ValueError(
            f"no plan is expected to reach {psnr:g} dB; the best is "
            f"{predicted_psnr(best, unit):.1f} dB"
        )
    return limit


def solve_all(
    profile: Profile,
    *,
    budgets: Iterable[int] | None = None,
    pinned: Iterable[int] = (),
    fit: Fit | None = None,
) -> Frontier:
    """The frontier of a profile, started from the paper's schedules as well.

    Besides ``pinned``, the first step of every network is computed.
    """
    statistics = profile.statistics
    lambdas = sweep_profile(statistics.residual_l1, statistics.residual_norm)
    return solve_frontier(
        statistics,
        profile.nominal,
        budgets=budgets,
        pinned={*pinned, *read_first_steps(profile.provenance)},
        starts=sorted(set(lambdas.values())),
        fit=fit,
    )


def make_policy(
    profile: Profile,
    plan: TrajectoryPlan | PaperPlan,
    *,
    embed: Profile | None = None,
    predicted_error: float | None = None,
    validation: Iterable[ValidationRow] = (),
    provenance: Mapping[str, str] | None = None,
) -> Policy:
    """A policy for the run that was profiled."""
    origin = {"ertacache": ertacache.__version__, "prompts": str(profile.num_prompts)}
    origin |= note_first_steps(read_first_steps(profile.provenance))
    return Policy(
        plan,
        profile.sigmas,
        fingerprint=profile.fingerprint,
        predicted_error=predicted_error,
        validation=tuple(validation),
        provenance=origin | dict(provenance or {}),
        profile=embed,
    )


def _threshold_steps(profile: Profile, wish: Wish, budget: int | None) -> tuple[int, ...]:
    distances = paper_distances(profile, wish.reuse)
    if wish.threshold is not None:
        return search_profile(*distances, threshold=wish.threshold)
    if budget is None or budget > profile.num_steps:
        raise ValueError(f"cannot compute {budget} of {profile.num_steps} steps")
    return pick_schedule(sweep_profile(*distances), budget)[1]


def paper_distances(profile: Profile, reuse: Reuse) -> tuple[Tensor, Tensor]:
    """L1 distances of what two steps would leave for reuse, and its norm: what eq. 12 compares."""
    statistics = profile.statistics
    if reuse == "velocity":
        return statistics.output_l1, statistics.output_norm
    return statistics.residual_l1, statistics.residual_norm


def _paper_plan(profile: Profile, steps: tuple[int, ...], wish: Wish) -> PaperPlan:
    statistics, sigmas = profile.statistics, profile.sigmas
    if wish.adjust_timesteps:
        l1, _ = paper_distances(profile, wish.reuse)
        scales = profile_step_scales(l1, statistics.output_l1, compute_steps=steps)
        sigmas = adjusted_sigmas(sigmas, scales)
    if not wish.rectify:
        return PaperPlan(steps, wish.reuse, sigmas)
    gain, bias = profile_rectification(statistics, compute_steps=steps, reuse=wish.reuse)
    return PaperPlan(steps, wish.reuse, sigmas, gain, bias)
