"""Local search over schedules, every budget side by side, on a simulated system.

A candidate differs from its base in one or two steps, so it is simulated from the first of them on:
what comes before is shared. Knows no network and no regularisation strength.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ertacache.core.plan import check_compute_steps
from ertacache.core.solve import Simulation, System, schedule_mask
from ertacache.core.threshold import uniform_schedule

__all__ = ["search_schedules", "spread_schedule"]

REACH = 2  # how far a computed step moves in one round
ROUNDS = 12
EXCHANGES = 2
GAIN = 0.999  # smaller improvements are rounding, not progress


class _Candidates(NamedTuple):
    """Schedules that might replace others.

    Attributes:
        base: the run whose beginning a candidate shares, (B,).
        receiver: the run that it would replace, (B,).
        mask: its computed steps, (B, T).
    """

    base: Tensor
    receiver: Tensor
    mask: Tensor


def spread_schedule(num_steps: int, budget: int, pinned: Iterable[int]) -> tuple[int, ...]:
    """The uniform schedule, moved as little as needed to hold the pinned steps.

    Example:
        >>> spread_schedule(10, 4, pinned={0, 5})
        (0, 3, 5, 9)
    """
    steps, fixed = set(uniform_schedule(num_steps, budget)), set(pinned)
    for pin in sorted(fixed - steps):
        steps.remove(min(steps - fixed, key=lambda k: (abs(k - pin), -k)))
        steps.add(pin)
    return tuple(sorted(steps))


def search_schedules(
    system: System,
    budgets: Sequence[int],
    *,
    pinned: Iterable[int] = (),
    starts: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """The best schedule found for each budget.

    Starts from the uniform schedules and from those of the caller. Single steps move while that
    helps; then neighbouring budgets lend each other their schedules, one step more or less.

    Args:
        system: one Gram matrix and how coefficients are fitted on it.
        budgets: numbers of computed steps, ascending.
        pinned: steps that are always computed, besides step 0.
        starts: further schedules to start from; those of other budgets are not used.
    """
    T = system.num_steps
    keep = torch.zeros(T, dtype=torch.bool)
    keep[[0, *pinned]] = True
    fixed = {0, *pinned}
    runs = [spread_schedule(T, n, fixed) for n in budgets]
    given = (sorted(fixed.union(check_compute_steps(start, T))) for start in starts)
    runs += [tuple(steps) for steps in given if len(steps) in budgets]
    mask = schedule_mask(runs, T)
    errors = _simulate(system, mask).errors[:, -1]
    _move_steps(system, mask, errors, keep=keep)
    best = [_best_run(mask, errors, n) for n in budgets]
    mask, errors = mask[best], errors[best]
    for _ in range(EXCHANGES):
        borrowed = _borrow_steps(mask, keep)
        if not _replace(system, mask, errors, candidates=borrowed).any():
            break
        _move_steps(system, mask, errors, keep=keep)
    return [tuple(row.nonzero()[:, 0].tolist()) for row in mask]


def _best_run(mask: Tensor, errors: Tensor, budget: int) -> int:
    return int(errors.where(mask.sum(1) == budget, torch.inf).argmin())


def _move_steps(system: System, mask: Tensor, errors: Tensor, *, keep: Tensor) -> None:
    """Move single steps of every run, in place, until that no longer helps."""
    active = torch.arange(len(mask))
    for _ in range(ROUNDS):
        runs, found = mask[active], errors[active]
        better = _replace(system, runs, found, candidates=_moves(runs, keep))
        mask[active], errors[active] = runs, found
        active = active[better]
        if not len(active):
            break


def _moves(mask: Tensor, keep: Tensor) -> _Candidates:
    """Every computed step of every run, moved by up to ``REACH`` to a free place."""
    run, step = (mask & ~keep).nonzero(as_tuple=True)
    shifts = torch.tensor([d for d in range(-REACH, REACH + 1) if d])
    run, step = run.repeat_interleave(len(shifts)), step.repeat_interleave(len(shifts))
    place = step + shifts.repeat(len(step) // len(shifts))
    free = (place >= 0) & (place < mask.shape[1])
    free &= ~mask[run, place.clamp(0, mask.shape[1] - 1)]
    run, step, place = run[free], step[free], place[free]
    moved = mask[run]
    rows = torch.arange(len(moved))
    moved[rows, step], moved[rows, place] = False, True
    return _Candidates(run, run, moved)


def _borrow_steps(mask: Tensor, keep: Tensor) -> _Candidates:
    """Every run with one step more or less, for the run next to it that has that many steps."""
    run, step = (~keep).expand_as(mask).nonzero(as_tuple=True)
    changed = mask[run]
    rows = torch.arange(len(changed))
    changed[rows, step] ^= True
    receiver = torch.where(changed[rows, step], run + 1, run - 1)
    inside = (receiver >= 0) & (receiver < len(mask))
    inside &= mask.sum(1)[receiver.clamp(0, len(mask) - 1)] == changed.sum(1)
    return _Candidates(run[inside], receiver[inside], changed[inside])


def _replace(system: System, mask: Tensor, errors: Tensor, *, candidates: _Candidates) -> Tensor:
    """Replace runs, in place, by their best candidate if it is better; say which were."""
    found = _simulate_variants(system, mask, candidates)
    lowest = errors.scatter_reduce(0, candidates.receiver, found, "amin")
    better = lowest < GAIN * errors
    winners = (found == lowest[candidates.receiver]) & better[candidates.receiver]
    mask[candidates.receiver[winners]] = candidates.mask[winners]
    errors[better] = lowest[better]
    return better


def _simulate(system: System, mask: Tensor) -> Simulation:
    return system.simulate(mask, torch.zeros(len(mask), dtype=torch.long))


def _simulate_variants(system: System, mask: Tensor, candidates: _Candidates) -> Tensor:
    """Final errors (B,) of candidates, each simulated from where it leaves its base run."""
    leaves = (candidates.mask != mask[candidates.base]).int().argmax(1)
    order = leaves.argsort(stable=True)
    base, computed = candidates.base[order], candidates.mask[order]
    joined = torch.searchsorted(leaves[order], torch.arange(system.num_steps), right=True)
    states = _simulate(system, mask).states
    running = states[0].rows(base[:0])
    for k, now in enumerate(joined.tolist()):
        before = len(running.error)
        if now > before:
            running = running.stack(states[k].rows(base[before:now]))
        which = torch.zeros(now, dtype=torch.long)
        running, _ = system.take(running, k, computed=computed[:now, k], which=which)
    return torch.empty_like(running.error).scatter_(0, order, running.error.sqrt())
