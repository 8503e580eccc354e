"""Plans for runs that begin later (image to image, the last entries of the sigma schedule).

All steps of such a run were profiled. If each of them is of first order, which the profile shows,
the statistics of such runs are a part of the profile's, and a plan solved from them is exact. Where
a step used outputs of steps before it (UniPC, DPM) it is not. Compute schedules are not searched,
so that solving takes a moment.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from ertacache.core.frontier import choose_ridges, spread_schedule
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit, fit_plans
from ertacache.formats.fingerprint import hash_sigmas
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile
from ertacache.integration.identity import calibrate_command, model_name, same_share
from ertacache.integration.private_api import Pipeline, keeps_history

__all__ = ["MULTISTEP", "LaterStarts", "find_step", "first_order_error", "solve_later"]

_LOG = logging.getLogger(__name__)
_RIDGES = (1e-3, 1e-1, 1e6)  # few, for the sake of time; the last is plain reuse

MULTISTEP = (
    "the policy is for whole runs: the scheduler's steps use outputs of steps before, which a run "
    "that begins later does not have"
)


class LaterStarts:
    """The policies of one handle by the step with which a run begins, solved when first needed."""

    def __init__(self, pipe: Pipeline, policy: Policy) -> None:
        """Begin with the attached policy."""
        self._pipe, self._policy = pipe, policy
        self._solved = {0: policy}

    def get(self, first: int, *, begin: int) -> Policy:
        """Return the policy of a run.

        Args:
            first: the step of the attached policy with which the run begins.
            begin: the place of that step in the scheduler's timesteps.
        """
        if first not in self._solved:
            self._solved[first] = self._solve(first, begin=begin)
        return self._solved[first]

    def _solve(self, first: int, *, begin: int) -> Policy:
        start, left = perf_counter(), self._policy.num_steps - first
        try:
            # In half precision the profile alone could not tell them apart.
            if keeps_history(self._pipe.scheduler):
                raise PolicyError(MULTISTEP)
            policy = solve_later(self._policy, first)
        except PolicyError as cause:
            raise PolicyError(self._refusal(cause, left=left, begin=begin)) from None
        _LOG.info(
            "solved the policy again for the last %d of its %d steps: %d computed; took %.0f ms",
            left,
            self._policy.num_steps,
            len(policy.compute_steps),
            1e3 * (perf_counter() - start),
        )
        return policy

    def _refusal(self, cause: PolicyError, *, left: int, begin: int) -> str:
        if begin:
            return (
                f"the run does not begin with step 0, as image to image does, and {cause}; "
                "pass strength=1, or detach it for this call"
            )
        command = calibrate_command(self._policy, model_name(self._pipe), steps=left)
        return (
            f"the run takes the last {left} steps of the policy's sigma schedule, but {cause}; "
            f"run: {command} (with --arg sigmas=[...] as in this call)"
        )


def solve_later(policy: Policy, first: int) -> Policy:
    """Return the policy for runs that begin with step ``first`` of ``policy``.

    The share of computed steps stays, rounded up. The coefficients are those of the profile, not
    refitted in closed loop.

    Raises:
        PolicyError: if the profile does not determine such runs.
    """
    profile = policy.profile
    if not isinstance(policy.plan, TrajectoryPlan):
        raise PolicyError("a policy of the paper's method is for whole runs")
    if profile is None:
        raise PolicyError("the policy is for whole runs and carries no profile to solve again")
    if not first_order_error(profile, first) <= _tolerance(profile.fingerprint.dtype):
        raise PolicyError(MULTISTEP)
    statistics, nominal = profile.statistics.from_step(first), profile.nominal[first:]
    fit = Fit(history=policy.plan.history)
    schedules = _schedules(policy, first)
    errors, ridges = choose_ridges(
        statistics, nominal, schedules=schedules, fit=fit, ridges=_RIDGES
    )
    best = min(range(len(schedules)), key=errors.__getitem__)
    fit = replace(fit, ridge=ridges[best])
    (plan,) = fit_plans(statistics, nominal, schedules=[schedules[best]], fit=fit)
    sigmas = profile.sigmas[first:].clone()
    facts = replace(policy.fingerprint, num_steps=len(sigmas) - 1, sigmas_hash=hash_sigmas(sigmas))
    return Policy(plan, sigmas, fingerprint=facts, predicted_error=errors[best])


def first_order_error(profile: Profile, first: int = 0) -> float:
    """How far any profiled step from ``first`` on is from ``c x + b v``, relative to the latent.

    Rounding, if the scheduler takes steps of first order; far more for a multistep scheduler.
    """
    T, gram = profile.num_steps, profile.statistics.gram  # noqa: N806
    c, b = profile.nominal[first:].unbind(1)
    k = torch.arange(first, T)
    x, y, v = k, k + 1, T + 1 + k  # places of x_k, x_{k+1} and v_k
    distance = gram.between(y, y) + c**2 * gram.between(x, x) + b**2 * gram.between(v, v)
    distance = distance - 2 * c * gram.between(x, y) - 2 * b * gram.between(v, y)
    distance = distance + 2 * c * b * gram.between(x, v)
    size = gram.between(y, y).clamp_min(torch.finfo(distance.dtype).tiny)
    return (distance.clamp_min(0) / size).amax().sqrt().item()


def _tolerance(dtype: str) -> float:
    """A few roundings in single precision, one in half: latents are kept in the run's dtype."""
    kind = getattr(torch, dtype, None)
    half = torch.finfo(kind).eps if isinstance(kind, torch.dtype) else 0.0
    return max(16 * torch.finfo(torch.float32).eps, half)


def _schedules(policy: Policy, first: int) -> list[tuple[int, ...]]:
    """The policy's own computed steps, resized to the budget, and the uniform schedule.

    Both compute the first step of every network.
    """
    T = policy.num_steps - first  # noqa: N806
    pinned = {0, *(k - first for k in policy.expert_steps if k > first)}
    budget = max(same_share(policy, T), len(pinned))
    own = pinned | {k - first for k in policy.compute_steps if k > first}
    resized = _resize(sorted(own), budget, T, pinned=pinned)
    return sorted({resized, spread_schedule(T, budget, pinned)})


def _resize(
    steps: Sequence[int], budget: int, num_steps: int, *, pinned: Collection[int] = (0,)
) -> tuple[int, ...]:
    """Add steps in the middle of the widest gaps, or leave out those that cost the least.

    Example:
        >>> _resize([0, 1, 2, 6], 5, 10), _resize([0, 1, 2, 6], 3, 10)
        ((0, 1, 2, 4, 6), (0, 2, 6))
        >>> _resize([0, 1, 2, 6], 3, 10, pinned={0, 1})
        (0, 1, 6)
    """
    chosen = list(steps)
    while len(chosen) < budget:
        ends = [*chosen[1:], num_steps]
        gap, at = max((end - at, -at) for at, end in zip(chosen, ends, strict=True))
        chosen = sorted([*chosen, gap // 2 - at])
    while len(chosen) > budget:
        around = zip(chosen, [*chosen[2:], num_steps], chosen[1:], strict=False)
        free = ((after - before, step) for before, after, step in around if step not in pinned)
        chosen.remove(min(free)[1])
    return tuple(chosen)


def find_step(timesteps: Tensor, timestep: Tensor) -> int:
    """Return the place of a timestep among a scheduler's.

    Example:
        >>> find_step(torch.tensor([900, 500, 100]), torch.tensor(500))
        1
    """
    places: list[int] = (timesteps == timestep).nonzero().flatten().tolist()
    if len(places) != 1:
        raise PolicyError(
            f"the run begins with timestep {float(timestep):g}, which is {len(places)} times in "
            "the scheduler's timesteps: no policy can follow it; detach it for this call"
        )
    return places[0]
