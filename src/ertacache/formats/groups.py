"""Groups and statistics by group in a policy file; ``core.groups`` makes them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ertacache.core.groups import FOLDS, MAX_BANDS, MAX_CHANNELS, Groups, GroupStatistics
from ertacache.formats.schema import (
    MAX_PROMPTS,
    FormatError,
    check_count,
    take_list,
    take_record,
)

__all__ = [
    "add_statistics",
    "check_groups",
    "check_statistics",
    "drop_folds",
    "groups_to_json",
    "statistics_to_json",
    "take_groups",
    "take_statistics",
]

_FIELDS: dict[str, tuple[type, ...]] = {"bands": (int,), "channels": (int,)}


def groups_to_json(groups: Groups) -> dict[str, object]:
    """The record of groups."""
    return {"bands": groups.bands, "channels": groups.channels}


def check_groups(groups: object, where: str = "groups") -> Groups:
    """Return the groups if they are such that a file can hold."""
    if not isinstance(groups, Groups):
        raise FormatError(f"{where} must be Groups, not {type(groups).__name__}")
    check_count(f"{where}.channels", groups.channels, low=1, high=MAX_CHANNELS)
    check_count(f"{where}.bands", groups.bands, low=1, high=MAX_BANDS)
    return groups


def take_groups(value: object, where: str) -> Groups:
    """The groups of a record, checked."""
    record = take_record(value, _FIELDS, where)
    channels = check_count(f"{where}.channels", record["channels"], low=1, high=MAX_CHANNELS)
    return Groups(channels, check_count(f"{where}.bands", record["bands"], low=1, high=MAX_BANDS))


def statistics_to_json(by_group: GroupStatistics) -> dict[str, object]:
    """The record of statistics by group, without their tensor."""
    return groups_to_json(by_group.groups) | {"counts": by_group.counts.tolist()}


def take_statistics(value: object) -> tuple[Groups, list[int]]:
    """Groups and numbers of runs of every fold."""
    where = "profile.groups"
    record = take_record(value, _FIELDS | {"counts": (list,)}, where)
    counts = take_list(record["counts"], int, f"{where}.counts")
    if len(counts) != FOLDS:
        raise FormatError(f"{where}.counts must have {FOLDS} entries, got {len(counts)}")
    for count in counts:
        check_count(f"{where}.counts", count, high=MAX_PROMPTS)
    return take_groups({name: record[name] for name in _FIELDS}, where), counts


def check_statistics(by_group: object, num_steps: int, folds: Sequence[int]) -> None:
    """Raise unless statistics by group are of a profile with these steps and folds."""
    if not isinstance(by_group, GroupStatistics):
        raise FormatError(f"by_group must be GroupStatistics, not {type(by_group).__name__}")
    check_groups(by_group.groups)
    found, _, vectors, _ = by_group.products.shape
    if (found, vectors) != (FOLDS, num_steps + 1):
        raise FormatError(
            f"statistics by group are of {found} folds and {vectors - 1} steps, "
            f"but the profile has {FOLDS} and {num_steps}"
        )
    counts = by_group.counts
    # A selection of runs keeps the folds that it fills.
    if bool(((counts != _count_runs(folds)) & (counts != 0)).any()):
        raise FormatError("statistics by group are of other runs")
    if not bool(counts.any()):
        raise FormatError("statistics by group are of no runs")
    if bool(by_group.products[counts == 0].any()):
        raise FormatError("statistics by group of a fold without runs must be 0")


def _count_runs(folds: Sequence[int]) -> Tensor:
    """Number of runs of every fold."""
    return torch.bincount(torch.tensor(folds), minlength=FOLDS)


def add_statistics(
    parts: Sequence[GroupStatistics | None], folds: Sequence[int]
) -> GroupStatistics | None:
    """The statistics of all parts, whose runs have these folds; None if one has none, or others."""
    known = [part for part in parts if part is not None]
    same = len({each.groups for each in known}) == 1
    if len(known) < len(parts) or not same:
        return None
    total = functools.reduce(operator.add, known)
    return drop_folds(total, set((total.counts != _count_runs(folds)).nonzero().flatten().tolist()))


def drop_folds(by_group: GroupStatistics | None, folds: set[int]) -> GroupStatistics | None:
    """The statistics without some folds; None if nothing is left."""
    if by_group is None:
        return None
    kept = by_group.select([fold for fold in range(FOLDS) if fold not in folds])
    return kept if bool(kept.counts.any()) else None
