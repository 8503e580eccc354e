"""The profile in a policy file: the statistics of a pipeline's full runs, one record per prompt.

``core.gram`` makes the statistics, ``policy`` has the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ertacache.core.gram import (
    Gram,
    RunStatistics,
    Schedule,
    fit_weights,
    resample,
    resampling_rows,
    run_rows,
)
from ertacache.core.groups import FOLDS, Groups, GroupStatistics
from ertacache.formats.fingerprint import ConfigScalar, check_scalar
from ertacache.formats.groups import (
    add_statistics,
    check_statistics,
    drop_folds,
    statistics_to_json,
    take_statistics,
)
from ertacache.formats.schema import (
    MAX_PROMPTS,
    MAX_STEPS,
    FormatError,
    PolicyError,
    check_count,
    check_sigmas,
    check_string,
    check_tensor,
    raising,
    take_list,
    take_record,
)

__all__ = ["Profile", "ProfiledPrompt"]

_PREFIX = "profile."  # of its tensors in a file
_FIELDS: dict[str, tuple[type, ...]] = {
    "begun": (bool,),
    "expert_steps": (list,),
    "groups": (dict, type(None)),
    "num_steps": (int,),
    "runs": (list,),
}
_RUN: dict[str, tuple[type, ...]] = {
    "arguments": (dict,),
    "elements": (int,),
    "fold": (int,),
    "prompt": (str,),
    "seed": (int,),
}
_TRIANGLES = ("inner", "output_l1", "residual_l1")  # symmetric, kept as upper triangles


@dataclass(frozen=True)
class ProfiledPrompt:
    """One run of a profile. Two runs with the same prompt, seed and arguments are the same run.

    Attributes:
        prompt: as it was given to the pipeline.
        seed: seed of the initial noise, 0 to 2**63 - 1.
        arguments: names and values of the pipeline's arguments that differ between the runs,
            sorted by name.

    Example:
        >>> ProfiledPrompt("a red apple", -1)
        Traceback (most recent call last):
        ertacache.formats.schema.PolicyError: seed must be from 0 to 9223372036854775807, got -1
    """

    prompt: str
    seed: int
    arguments: tuple[tuple[str, ConfigScalar], ...] = ()

    def __post_init__(self) -> None:
        """Check types and ranges."""
        with raising(PolicyError):
            check_string("prompt", self.prompt, empty=True)
            check_count("seed", self.seed)
            pairs = tuple((name, value) for name, value in self.arguments)
            object.__setattr__(self, "arguments", pairs)
            for name, value in pairs:
                check_scalar(f"arguments.{check_string('an argument', name)[:40]}", value)
            names = [name for name, _ in pairs]
            if names != sorted(set(names)):
                raise FormatError("arguments must be sorted by name, no name twice")


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """Statistics of full runs over P prompts and T steps.

    Attributes:
        schedule: of all runs.
        statistics: what was measured, one set per run.
        runs: the P runs, in the order of the statistics, no two the same.
        expert_steps: steps after 0 at which another network of the pipeline takes over; they must
            be computed. Empty for pipelines with one network.
        folds: fold of every run, 0 to 7; by default they take turns.
        by_group: inner products by group, added up over the runs of a fold with their weights;
            None if the layout of the latents is not known.
    """

    schedule: Schedule
    statistics: RunStatistics
    runs: tuple[ProfiledPrompt, ...]
    expert_steps: tuple[int, ...] = field(default=())
    folds: tuple[int, ...] = field(default=())
    by_group: GroupStatistics | None = None

    def __post_init__(self) -> None:
        """Check that the parts are valid and belong together."""
        object.__setattr__(self, "runs", tuple(self.runs))
        folds = tuple(self.folds) or tuple(place % FOLDS for place in range(len(self.runs)))
        object.__setattr__(self, "folds", folds)
        with raising(PolicyError):
            _check_schedule(self.schedule)
            self._check_runs()
            self._check_statistics()
            self._check_groups()
            experts = _check_expert_steps(self.expert_steps, self.num_steps)
            object.__setattr__(self, "expert_steps", experts)

    def __repr__(self) -> str:
        """What it is in one line, without its tensors."""
        runs = f"{self.num_runs} run{'' if self.num_runs == 1 else 's'}"
        return f"<profile of {runs} of {self.num_steps} steps>"

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return self.schedule.num_steps

    @property
    def num_runs(self) -> int:
        """Number of profiled runs P."""
        return len(self.runs)

    @property
    def finest(self) -> Groups | None:
        """The finest groups that it knows; None if none."""
        return None if self.by_group is None else self.by_group.groups

    @property
    def weights(self) -> Tensor:
        """How much each run counts in a fit, shape (P,)."""
        return fit_weights(self.statistics.gram, self.schedule.nominal)

    def run_grams(self, run: Schedule | None = None) -> Gram:
        """The weighted Gram matrices of all runs, on its own schedule or another."""
        gram = self.statistics.gram.weighted(self.weights)
        return gram if run is None else resample(gram, self.schedule, run)

    def gram(self, groups: Groups, run: Schedule | None = None) -> Gram:
        """The mean Gram matrices of some groups, of full runs on its own schedule or another.

        Weighted, and but for a factor that all of them share.

        Raises:
            PolicyError: if the profile does not know them.
        """
        if self.by_group is None:
            raise PolicyError(f"the profile has no statistics of {groups}")
        rows = run_rows(self.schedule)
        if run is not None and not self.schedule.same_run(run):
            rows = resampling_rows(self.schedule, run) @ rows
        return self.by_group.gram(rows, groups)

    def select(self, runs: list[ProfiledPrompt]) -> Profile:
        """The profile of some of its runs; by group, that of the folds which they fill."""
        place = {run: number for number, run in enumerate(self.runs)}
        places = [place[run] for run in runs]
        left_out = {self.folds[k] for k in set(range(self.num_runs)) - set(places)}
        return replace(
            self,
            statistics=self.statistics.select(places),
            runs=tuple(runs),
            folds=tuple(self.folds[k] for k in places),
            by_group=drop_folds(self.by_group, left_out),
        )

    def halves(
        self, runs: Sequence[ProfiledPrompt]
    ) -> tuple[list[ProfiledPrompt], list[ProfiledPrompt]]:
        """Some of its runs in two halves, whose folds differ if possible."""
        fold = dict(zip(self.runs, self.folds, strict=True))
        rank = {fold: place for place, fold in enumerate(sorted({fold[run] for run in runs}))}
        turns = [rank[fold[run]] if len(rank) > 1 else place for place, run in enumerate(runs)]
        first, second = (
            [run for run, turn in zip(runs, turns, strict=True) if turn % 2 == k] for k in (0, 1)
        )
        return first, second

    def merge(self, *others: Profile) -> Profile:
        """Return the profile of all runs of this one and ``others``.

        By group, that of the folds which all parts know; none if their groups differ.

        Raises:
            PolicyError: if they have other schedules, or share a run.
        """
        parts = (self, *others)
        if not all(_same_schedule(self.schedule, other.schedule) for other in others):
            raise PolicyError("profiles with different sigma schedules cannot be merged")
        runs = tuple(run for part in parts for run in part.runs)
        twice = _first_repeated(runs)
        if twice is not None:
            raise PolicyError(
                f"profiles that share a run cannot be merged: {twice.prompt[:60]!r} with seed "
                f"{twice.seed} is in more than one of them, and would count twice"
            )
        folds = tuple(fold for part in parts for fold in part.folds)
        return replace(
            self,
            statistics=self.statistics.join(*(other.statistics for other in others)),
            runs=runs,
            expert_steps=tuple({k for part in parts for k in part.expert_steps}),
            folds=folds,
            by_group=add_statistics([part.by_group for part in parts], folds),
        )

    def to_json(self) -> dict[str, object]:
        """The record of a file."""
        counts = self.statistics.elements.tolist()
        runs = [
            {
                "arguments": dict(run.arguments),
                "elements": count,
                "fold": fold,
                "prompt": run.prompt,
                "seed": run.seed,
            }
            for run, count, fold in zip(self.runs, counts, self.folds, strict=True)
        ]
        return {
            "begun": self.schedule.begun,
            "expert_steps": list(self.expert_steps),
            "groups": None if self.by_group is None else statistics_to_json(self.by_group),
            "num_steps": self.num_steps,
            "runs": runs,
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a file."""
        parts: dict[str, Tensor] = {
            name: getattr(self.schedule, name) for name in _schedule_shapes(self.num_steps)
        }
        for entry in fields(self.statistics):
            value: Tensor = getattr(self.statistics, entry.name)
            if entry.name != "elements":
                packed = entry.name in _TRIANGLES
                parts[entry.name] = _pack_triangle(value) if packed else value
        if self.by_group is not None:
            products = self.by_group.products
            parts["groups"] = _pack_triangle(products.flatten(0, 1)).view(*products.shape[:2], -1)
        return {_PREFIX + name: value for name, value in parts.items()}

    @staticmethod
    def shapes(record: object) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a file with this record."""
        found = take_record(record, _FIELDS, "profile")
        T = check_count("profile.num_steps", found["num_steps"], low=1, high=MAX_STEPS)  # noqa: N806
        P = _check_run_count(len(found["runs"]))  # noqa: N806
        shapes: dict[str, tuple[int, ...]] = _schedule_shapes(T) | {
            "inner": (P, (2 * T + 1) * (T + 1)),
            "means": (P, 2 * T + 1),
            "output_l1": (P, T * (T + 1) // 2),
            "output_norm": (P, T),
            "residual_l1": (P, T * (T + 1) // 2),
            "residual_norm": (P, T),
        }
        if found["groups"] is not None:
            count = take_statistics(found["groups"])[0].count
            shapes["groups"] = (FOLDS, count, (T + 1) * (T + 2) // 2)
        return {_PREFIX + name: shape for name, shape in shapes.items()}

    @classmethod
    def from_parts(cls, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> Profile:
        """The profile of a record whose ``shapes`` were checked, and its tensors."""
        T = record["num_steps"]  # noqa: N806
        parts = {
            name.removeprefix(_PREFIX): value
            for name, value in tensors.items()
            if name.startswith(_PREFIX)
        }
        schedule = Schedule(
            begun=record["begun"], **{name: parts.pop(name) for name in _schedule_shapes(T)}
        )
        for name in _TRIANGLES:
            parts[name] = _unpack_triangle(parts[name], 2 * T + 1 if name == "inner" else T)
        experts = take_list(record["expert_steps"], int, "profile.expert_steps")
        if experts != sorted(set(experts)):
            raise FormatError("profile.expert_steps must ascend")
        runs = [_take_run(run, place) for place, run in enumerate(record["runs"])]
        elements = torch.tensor([count for _, count, _ in runs], dtype=torch.int64)
        folds = [fold for _, _, fold in runs]
        by_group = None
        if record["groups"] is not None:
            packed = parts.pop("groups")
            products = _unpack_triangle(packed.flatten(0, 1), T + 1)
            groups, counts = take_statistics(record["groups"])
            products = products.view(*packed.shape[:2], T + 1, T + 1)
            by_group = GroupStatistics(groups, products, torch.tensor(counts))
        return cls(
            schedule,
            RunStatistics(elements=elements, **parts),
            tuple(run for run, _, _ in runs),
            tuple(experts),
            tuple(folds),
            by_group,
        )

    def _check_runs(self) -> None:
        _check_run_count(len(self.runs))
        for run in self.runs:
            if not isinstance(run, ProfiledPrompt):
                raise FormatError(f"runs must hold ProfiledPrompt, not {type(run).__name__}")
        twice = _first_repeated(self.runs)
        if twice is not None:
            raise FormatError(f"{twice.prompt[:60]!r} with seed {twice.seed} is there twice")

    def _check_groups(self) -> None:
        if len(self.folds) != self.num_runs:
            raise FormatError(f"{len(self.folds)} folds of {self.num_runs} runs")
        for fold in self.folds:
            check_count("fold", fold, high=FOLDS - 1)
        if self.by_group is not None:
            check_statistics(self.by_group, self.num_steps, self.folds)

    def _check_statistics(self) -> None:
        if not isinstance(self.statistics, RunStatistics):
            raise FormatError("statistics must be RunStatistics")
        found = (self.statistics.num_prompts, self.statistics.num_steps)
        if found != (self.num_runs, self.num_steps):
            raise FormatError(
                f"statistics are of {found[0]} runs and {found[1]} steps, "
                f"but the profile has {self.num_runs} and {self.num_steps}"
            )


def _schedule_shapes(num_steps: int) -> dict[str, tuple[int, ...]]:
    T = num_steps  # noqa: N806
    return {
        "latents": (T + 1, T + 1),
        "nominal": (T, 2),
        "scale": (T + 1,),
        "sigmas": (T + 1,),
    }


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule):
        raise FormatError(f"schedule must be a Schedule, not {type(schedule).__name__}")
    check_count("num_steps", schedule.num_steps, low=1, high=MAX_STEPS)
    check_sigmas(schedule.sigmas, num_steps=schedule.num_steps)
    for name, shape in _schedule_shapes(schedule.num_steps).items():
        check_tensor(name, getattr(schedule, name), shape=shape)
    if bool((schedule.scale <= 0).any()):
        raise FormatError("scale must be positive")
    if bool(schedule.latents.triu(1).any()):
        raise FormatError("latents must be 0 above the diagonal: a later output is not known yet")


def _same_schedule(ours: Schedule, theirs: Schedule) -> bool:
    return ours.begun == theirs.begun and all(
        torch.equal(getattr(ours, name), getattr(theirs, name)) for name in _schedule_shapes(1)
    )


def _check_run_count(count: int) -> int:
    if not 1 <= count <= MAX_PROMPTS:
        raise FormatError(f"a profile has 1 to {MAX_PROMPTS} runs, not {count}")
    return count


def _take_run(value: object, place: int) -> tuple[ProfiledPrompt, int, int]:
    record = take_record(value, _RUN, f"profile.runs[{place}]")
    elements = check_count(f"profile.runs[{place}].elements", record["elements"], low=1)
    fold = check_count(f"profile.runs[{place}].fold", record["fold"], high=FOLDS - 1)
    arguments = tuple(sorted(record["arguments"].items()))
    return ProfiledPrompt(record["prompt"], record["seed"], arguments), elements, fold


def _check_expert_steps(value: object, num_steps: int) -> tuple[int, ...]:
    """Return the steps at which networks take over, ascending; raise if they are not valid."""
    if not isinstance(value, tuple | list):
        raise FormatError(f"expert_steps must be a tuple, got {type(value).__name__}")
    steps = {check_count("expert_steps", k, low=1, high=num_steps - 1) for k in value}
    return tuple(sorted(steps))


def _first_repeated(runs: tuple[ProfiledPrompt, ...]) -> ProfiledPrompt | None:
    seen: set[ProfiledPrompt] = set()
    for run in runs:
        if run in seen:
            return run
        seen.add(run)
    return None


def _pack_triangle(matrix: Tensor) -> Tensor:
    """Upper triangles with their diagonals, row by row: (P, n, n) to (P, n (n + 1) / 2).

    Example:
        >>> _pack_triangle(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]))
        tensor([[1., 2., 3.]])
    """
    row, column = torch.triu_indices(matrix.shape[-1], matrix.shape[-1])
    return matrix[:, row, column]


def _unpack_triangle(packed: Tensor, size: int) -> Tensor:
    """The matrices again; undoes ``_pack_triangle``."""
    row, column = torch.triu_indices(size, size)
    matrix = packed.new_empty(len(packed), size, size)
    matrix[:, row, column] = packed
    matrix[:, column, row] = packed
    return matrix
