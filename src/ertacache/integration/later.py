"""A policy for the last steps of its table, solved again from the profile that it carries.

Image to image, or the last entries of the table given as ``sigmas=``, is a run whose steps were all
profiled. If each of them is of first order, which the profile itself tells, the profile of such
runs is a part of this one, and solving it is exact. Where a step used outputs of steps before
(UniPC, DPM) it is not, nor on a table with other gaps: those runs have trajectories of their own.
Schedules are not searched, so that solving takes a moment. Knows no pipeline and no scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ertacache.core.frontier import choose_ridges
from ertacache.core.gram import RunStatistics
from ertacache.core.plan import TrajectoryPlan
from ertacache.core.search import spread_schedule
from ertacache.core.solve import Fit, fit_plans
from ertacache.formats.fingerprint import hash_sigmas
from ertacache.formats.firststeps import read_first_steps
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile

__all__ = ["MULTISTEP", "budget_of", "first_order_error", "later_steps", "solve_later"]

_RIDGES = (1e-3, 1e-1, 1e6)  # few, for the sake of time; the last is plain reuse


MULTISTEP = (
    "the policy is for whole runs: the scheduler's steps use outputs of steps before, which a run "
    "that begins later does not have"
)


def solve_later(policy: Policy, first: int) -> Policy:
    """Return the policy for runs that begin with step ``first`` of the table of ``policy``.

    The share of computed steps stays, rounded up. The coefficients are those of the profile, not
    refitted in closed loop.

    Raises:
        PolicyError: if the profile does not tell what such runs do; the sentence says why.
    """
    profile = policy.profile
    if not isinstance(policy.plan, TrajectoryPlan):
        raise PolicyError("a policy of the paper's method is for whole runs")
    if profile is None:
        raise PolicyError("the policy is for whole runs and carries no profile to solve again")
    if not first_order_error(profile, first) <= _tolerance(profile.fingerprint.dtype):
        raise PolicyError(MULTISTEP)
    statistics, nominal = later_steps(profile.statistics, first), profile.nominal[first:]
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


def budget_of(policy: Policy, num_steps: int) -> int:
    """Computed steps of another number of steps, for the same share as the policy's, rounded up."""
    return math.ceil(num_steps * len(policy.compute_steps) / policy.num_steps)


def later_steps(statistics: RunStatistics, first: int) -> RunStatistics:
    """The statistics of the steps from ``first`` on, as if the runs had begun there.

    Example:
        >>> from ertacache.core.gram import profile_run
        >>> from ertacache.core.solver import run_reference
        >>> noise, table = torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 0.5, 0.25, 0.0])
        >>> run = run_reference(lambda x, sigma: x, noise, sigmas=table)
        >>> rest = run_reference(lambda x, sigma: x, run.latents[1], sigmas=table[1:])
        >>> later = later_steps(profile_run(run), 1)
        >>> torch.equal(later.inner, profile_run(rest).inner)
        True
    """
    T = statistics.num_steps  # noqa: N806
    rows = torch.cat([torch.arange(first, T + 1), torch.arange(T + 1 + first, 2 * T + 1)])
    return RunStatistics(
        inner=statistics.inner[:, rows][:, :, rows],
        means=statistics.means[:, rows],
        residual_l1=statistics.residual_l1[:, first:, first:],
        residual_norm=statistics.residual_norm[:, first:],
        output_l1=statistics.output_l1[:, first:, first:],
        output_norm=statistics.output_norm[:, first:],
        elements=statistics.elements,
    )


def first_order_error(profile: Profile, first: int = 0) -> float:
    """How far any profiled step from ``first`` on is from ``c x + b v``, relative to the latent.

    Rounding, if the scheduler takes steps of first order; far more for a multistep scheduler.
    """
    T, G = profile.num_steps, profile.statistics.inner  # noqa: N806
    c, b = profile.nominal[first:].unbind(1)
    k = torch.arange(first, T)
    x, y, v = k, k + 1, T + 1 + k
    distance: Tensor = G[:, y, y] + c**2 * G[:, x, x] + b**2 * G[:, v, v]
    distance = distance - 2 * c * G[:, x, y] - 2 * b * G[:, v, y] + 2 * c * b * G[:, x, v]
    size = G[:, y, y].clamp_min(torch.finfo(G.dtype).tiny)
    return (distance.clamp_min(0) / size).amax().sqrt().item()


def _tolerance(dtype: str) -> float:
    """A few roundings in single precision, one in half: latents are kept in the run's type."""
    kind = getattr(torch, dtype, None)
    half = torch.finfo(kind).eps if isinstance(kind, torch.dtype) else 0.0
    return max(16 * torch.finfo(torch.float32).eps, half)


def _schedules(policy: Policy, first: int) -> list[tuple[int, ...]]:
    """The policy's own computed steps, as many as the budget asks for, and the even schedule.

    In both, the first step of every network is computed.
    """
    T = policy.num_steps - first  # noqa: N806
    begins = read_first_steps(policy.provenance)
    pinned = {0, *(k - first for k in begins if first < k < policy.num_steps)}
    budget = max(budget_of(policy, T), len(pinned))
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
