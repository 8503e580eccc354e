"""Compute schedules: uniform ones, those of other sigmas, and a local search for the best.

The search goes over all budgets side by side, on the simulation of ``simulate``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ertacache.core.plans import check_compute_steps, uniform_schedule
from ertacache.core.simulate import System, schedule_mask

__all__ = ["ROUNDS", "map_schedule", "search_schedules", "spread_schedule"]

REACH = 2  # how far a computed step moves in one round
ROUNDS = 12
EXCHANGES = 2
GAIN = 0.999  # smaller improvements are rounding, not progress
FEW = 128  # runs that are simulated in hardly more time than one


def map_schedule(
    steps: Sequence[int], sigmas: Tensor, onto: Tensor, *, budget: int, pinned: Collection[int]
) -> tuple[int, ...]:
    """A compute schedule on other sigmas: the same noise levels, as nearly as there are steps.

    Steps that are missing are added in the middle of the widest gaps, and those that cost the
    least are left out.

    Args:
        steps: the computed steps.
        sigmas: their sigma schedule, descending.
        onto: the other sigma schedule.
        budget: number of computed steps on it.
        pinned: steps there that must be computed; step 0 always is.

    Example:
        >>> ten, five = torch.linspace(1, 0, 11), torch.linspace(1, 0, 6)
        >>> map_schedule((0, 2, 4, 8), ten, five, budget=3, pinned=())
        (0, 2, 4)
    """
    levels = sigmas[list(steps)]
    inside = levels[levels <= onto[0]]
    nearest = (onto[:-1, None] - inside).abs().argmin(0)
    fixed = {0, *pinned}
    return _resize(sorted(fixed.union(nearest.tolist())), budget, len(onto) - 1, pinned=fixed)


def _resize(
    steps: Sequence[int], budget: int, num_steps: int, *, pinned: Collection[int]
) -> tuple[int, ...]:
    """Add steps in the middle of the widest gaps, or leave out those that cost the least.

    Example:
        >>> _resize([0, 1, 2, 6], 5, 10, pinned={0}), _resize([0, 1, 2, 6], 3, 10, pinned={0})
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
    rounds: int = ROUNDS,
) -> list[tuple[int, ...]]:
    """The best schedule found for each budget.

    Starts from the uniform schedules and from those of the caller. Single steps move while that
    helps; then neighbouring budgets lend each other their schedules, one step more or less.

    Args:
        system: one Gram matrix and how coefficients are fitted on it.
        budgets: numbers of computed steps, ascending.
        pinned: steps that are always computed, besides step 0.
        starts: further schedules to start from; those of other budgets are not used.
        rounds: how often the steps of a schedule are moved, at most.
    """
    T = system.num_steps
    keep = torch.zeros(T, dtype=torch.bool)
    keep[[0, *pinned]] = True
    fixed = {0, *pinned}
    runs = [spread_schedule(T, n, fixed) for n in budgets]
    given = (sorted(fixed.union(check_compute_steps(start, T))) for start in starts)
    runs += [tuple(steps) for steps in given if len(steps) in budgets]
    mask = schedule_mask(runs, T)
    errors = _simulate(system, mask)
    if rounds == ROUNDS:  # a search in haste moves only the best start
        _move_steps(system, mask, errors, keep=keep, rounds=rounds)
    best = [_best_run(mask, errors, n) for n in budgets]
    mask, errors = mask[best], errors[best]
    _move_steps(system, mask, errors, keep=keep, rounds=rounds)
    for _ in range(EXCHANGES):
        borrowed = _borrow_steps(mask, keep)
        if not _replace(system, mask, errors, candidates=borrowed).any():
            break
        _move_steps(system, mask, errors, keep=keep, rounds=rounds)
    return [tuple(row.nonzero()[:, 0].tolist()) for row in mask]


def _best_run(mask: Tensor, errors: Tensor, budget: int) -> int:
    return int(errors.where(mask.sum(1) == budget, torch.inf).argmin())


def _move_steps(system: System, mask: Tensor, errors: Tensor, *, keep: Tensor, rounds: int) -> None:
    """Move single steps of every run, in place, until that no longer helps."""
    active = torch.arange(len(mask))
    for done in range(rounds):
        runs, found = mask[active], errors[active]
        # In haste a step may first go anywhere: there are no neighbouring budgets to learn from.
        reach = mask.shape[1] if rounds < ROUNDS and done == 0 else REACH
        better = _replace(system, runs, found, candidates=_moves(runs, keep, reach))
        mask[active], errors[active] = runs, found
        active = active[better]
        if not len(active):
            break


def _moves(mask: Tensor, keep: Tensor, reach: int) -> _Candidates:
    """Every computed step of every run, moved by up to ``reach`` to a free place."""
    run, step = (mask & ~keep).nonzero(as_tuple=True)
    shifts = torch.tensor([d for d in range(-reach, reach + 1) if d])
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
    """Every run with one step more or less, for the neighbouring budget with that many steps."""
    run, step = (~keep).expand_as(mask).nonzero(as_tuple=True)
    changed = mask[run]
    rows = torch.arange(len(changed))
    changed[rows, step] ^= True
    receiver = torch.where(changed[rows, step], run + 1, run - 1)
    inside = (receiver >= 0) & (receiver < len(mask))
    inside &= mask.sum(1)[receiver.clamp(0, len(mask) - 1)] == changed.sum(1)
    return _Candidates(run[inside], receiver[inside], changed[inside])


def _replace(system: System, mask: Tensor, errors: Tensor, *, candidates: _Candidates) -> Tensor:
    """Replace runs, in place, by their best candidate if it is better; return which were."""
    if not len(candidates.mask):  # a single budget has no neighbour to borrow from
        return torch.zeros(len(mask), dtype=torch.bool)
    found = _simulate_variants(system, mask, candidates)
    lowest = errors.scatter_reduce(0, candidates.receiver, found, "amin")
    better = lowest < GAIN * errors
    winners = (found == lowest[candidates.receiver]) & better[candidates.receiver]
    mask[candidates.receiver[winners]] = candidates.mask[winners]
    errors[better] = lowest[better]
    return better


def _simulate(system: System, mask: Tensor) -> Tensor:
    """Final errors (B,) of several runs."""
    return system.simulate(mask, torch.zeros(len(mask), dtype=torch.long)).errors[:, -1]


def _simulate_variants(system: System, mask: Tensor, candidates: _Candidates) -> Tensor:
    """Final errors (B,) of candidates, each simulated from where it leaves its base run.

    A candidate and its base share all steps before the first one in which they differ, so the
    candidate starts there from the base's state. Sorted by that step, the candidates that have
    started are always the first rows of the batch, which grows as the steps go on.
    """
    if len(candidates.mask) <= FEW:  # little is gained by what they share
        return _simulate(system, candidates.mask)
    leaves = (candidates.mask != mask[candidates.base]).int().argmax(1)
    order = leaves.argsort(stable=True)
    joined = torch.searchsorted(leaves[order], torch.arange(system.num_steps), right=True)
    base, computed = candidates.base[order].numpy(), candidates.mask[order].numpy()
    bases = system.start(np.zeros(len(mask), dtype=np.int64))
    runs = system.start(np.zeros(len(base), dtype=np.int64))
    before = 0
    for k, now in enumerate(joined.tolist()):
        if now:
            runs.put(slice(before, now), bases, base[before:now])
            system.take(runs.first(now), k, computed=computed[:now, k])
        system.take(bases, k, computed=mask[:, k].numpy())
        before = now
    errors = torch.from_numpy(np.sqrt(runs.error))
    return torch.empty_like(errors).scatter_(0, order, errors)
