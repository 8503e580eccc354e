"""The profile file: the statistics of a pipeline's full runs, one record per prompt.

``core.gram`` makes the statistics, ``policy`` may embed a profile. The file is specified in
``docs/formats.md``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.formats.container import Document, open_document, open_regular, pack, write_atomic
from ertacache.formats.fingerprint import Fingerprint, hash_sigmas
from ertacache.formats.schema import (
    FormatError,
    check_count,
    check_sigmas,
    check_string,
    check_strings,
    check_tensor,
    raising,
    take_record,
)

__all__ = [
    "Profile",
    "ProfileError",
    "ProfiledPrompt",
    "check_expert_steps",
    "check_schedule",
    "read_expert_steps",
    "write_expert_steps",
]

MAX_PROMPTS = 10_000
_EXPERT_STEPS = "first steps of networks"  # key in the provenance of a file
_FIELDS: dict[str, tuple[type, ...]] = {"fingerprint": (dict,), "prompts": (list,)}
_FIELDS_2 = _FIELDS | {"provenance": (dict,)}
_PROMPT: dict[str, tuple[type, ...]] = {"elements": (int,), "prompt": (str,), "seed": (int,)}


class ProfileError(FormatError):
    """A profile is not valid, or its file cannot be read or written."""


@dataclass(frozen=True)
class ProfiledPrompt:
    """One run of a profile. Two runs with the same prompt and seed are the same run.

    Attributes:
        prompt: as it was given to the pipeline.
        seed: seed of the initial noise, 0 to 2**63 - 1.

    Example:
        >>> ProfiledPrompt("a red apple", -1)
        Traceback (most recent call last):
        ertacache.formats.profile.ProfileError: seed must be from 0 to 9223372036854775807, got -1
    """

    prompt: str
    seed: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        with raising(ProfileError):
            check_string("prompt", self.prompt, empty=True)
            check_count("seed", self.seed)


@dataclass(frozen=True, eq=False)
class Profile:
    """Statistics of full runs over P prompts and T steps.

    Attributes:
        fingerprint: what the runs were.
        sigmas: nominal sigma schedule, shape (T + 1,), float64, strictly descending.
        nominal: first-order update of the user's scheduler, shape (T, 2), float64:
            ``x[k+1] = nominal[k, 0] x[k] + nominal[k, 1] v[k]``.
        statistics: what was measured, one set per prompt.
        prompts: the P runs, in the order of the statistics, no two the same.
        provenance: where the profile comes from, such as the command line. A policy that embeds a
            profile keeps its own provenance only.
        expert_steps: steps after 0 at which another network of the pipeline takes over; they must
            be computed. Empty for pipelines with one network.
    """

    fingerprint: Fingerprint
    sigmas: Tensor
    nominal: Tensor
    statistics: RunStatistics
    prompts: tuple[ProfiledPrompt, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)
    expert_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that the parts are valid and belong together."""
        object.__setattr__(self, "prompts", tuple(self.prompts))
        with raising(ProfileError):
            check_schedule(self.fingerprint, self.sigmas)
            check_tensor("nominal", self.nominal, shape=(self.num_steps, 2))
            self._check_prompts()
            self._check_statistics()
            object.__setattr__(self, "provenance", check_strings("provenance", self.provenance))
            experts = check_expert_steps(self.expert_steps, self.num_steps)
            object.__setattr__(self, "expert_steps", experts)

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return self.fingerprint.num_steps

    @property
    def num_prompts(self) -> int:
        """Number of profiled runs P."""
        return len(self.prompts)

    def merge(self, *others: Profile) -> Profile:
        """Return the profile of all prompts of this one and ``others``.

        Raises:
            ProfileError: if they are not of the same run, or share a prompt and seed.
        """
        parts = (self, *others)
        for other in others:
            self._check_mergeable(other)
        prompts = tuple(record for part in parts for record in part.prompts)
        twice = _first_repeated(prompts)
        if twice is not None:
            raise ProfileError(
                f"profiles that share a run cannot be merged: {twice.prompt[:60]!r} with seed "
                f"{twice.seed} is in more than one of them, and would count twice"
            )
        statistics = self.statistics.join(*(other.statistics for other in others))
        return replace(
            self,
            statistics=statistics,
            prompts=prompts,
            provenance=_merge_provenance([part.provenance for part in parts]),
            expert_steps=tuple({k for part in parts for k in part.expert_steps}),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path``; an old file stays until the new one is whole."""
        with raising(ProfileError, f"cannot save {os.fspath(path)!r}: "):
            write_atomic(path, self._to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile; any problem with the file is a ``ProfileError`` that names it.

        Example:
            >>> Profile.load("absent")
            Traceback (most recent call last):
            ertacache.formats.profile.ProfileError: cannot load 'absent': No such file or directory
        """
        with (
            raising(ProfileError, f"cannot load {os.fspath(path)!r}: "),
            open_regular(path) as (stream, size),
        ):
            return cls._from_document(open_document(stream, size, kind="profile"))

    @classmethod
    def _from_bytes(cls, data: bytes, where: str) -> Profile:
        with raising(ProfileError, f"cannot load {where!r}: "):
            return cls._from_document(open_document(BytesIO(data), len(data), kind="profile"))

    @classmethod
    def _from_document(cls, document: Document) -> Profile:
        known = _FIELDS if document.version == 1 else _FIELDS_2
        fields = take_record(document.fields, known, "profile")
        origin = fields.get("provenance", {})
        if document.version > 1 and not origin:
            raise FormatError("a profile without provenance has format version 1")
        fingerprint = Fingerprint._from_json(fields["fingerprint"])
        prompts = take_prompts(fields["prompts"])
        shapes = profile_shapes(fingerprint.num_steps, len(prompts))
        shapes["sigmas"] = (fingerprint.num_steps + 1,)
        tensors = document.read_tensors(shapes)
        profile = cls._from_parts(fingerprint, tensors["sigmas"], prompts, tensors=tensors)
        experts, origin = read_expert_steps(origin)
        return replace(profile, provenance=origin, expert_steps=experts)

    @classmethod
    def _from_parts(
        cls,
        fingerprint: Fingerprint,
        sigmas: Tensor,
        prompts: list[tuple[ProfiledPrompt, int]],
        *,
        tensors: Mapping[str, Tensor],
    ) -> Profile:
        statistics = RunStatistics(
            inner=_unpack_triangle(tensors["inner"], 2 * fingerprint.num_steps + 1),
            means=tensors["means"],
            residual_l1=_unpack_triangle(tensors["residual_l1"], fingerprint.num_steps),
            residual_norm=tensors["residual_norm"],
            output_l1=_unpack_triangle(tensors["output_l1"], fingerprint.num_steps),
            output_norm=tensors["output_norm"],
            elements=torch.tensor([elements for _, elements in prompts], dtype=torch.int64),
        )
        records = tuple(record for record, _ in prompts)
        return cls(fingerprint, sigmas, tensors["nominal"], statistics, records)

    def _to_bytes(self) -> bytes:
        fields: dict[str, object] = {"fingerprint": self.fingerprint._to_json()}
        fields["prompts"] = self._prompts_json()
        tensors = {"sigmas": self.sigmas, **self._tensors()}
        origin = write_expert_steps(self.provenance, self.expert_steps)
        if not origin:
            return pack("profile", fields, tensors=tensors)
        return pack("profile", fields | {"provenance": origin}, tensors=tensors, version=2)

    def _prompts_json(self) -> list[dict[str, object]]:
        counts = self.statistics.elements.tolist()
        return [
            {"elements": count, "prompt": record.prompt, "seed": record.seed}
            for record, count in zip(self.prompts, counts, strict=True)
        ]

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "inner": _pack_triangle(self.statistics.inner),
            "means": self.statistics.means,
            "nominal": self.nominal,
            "output_l1": _pack_triangle(self.statistics.output_l1),
            "output_norm": self.statistics.output_norm,
            "residual_l1": _pack_triangle(self.statistics.residual_l1),
            "residual_norm": self.statistics.residual_norm,
        }

    def _check_prompts(self) -> None:
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            raise FormatError(f"a profile has 1 to {MAX_PROMPTS} prompts, not {len(self.prompts)}")
        for record in self.prompts:
            if not isinstance(record, ProfiledPrompt):
                raise FormatError(f"prompts must hold ProfiledPrompt, not {type(record).__name__}")
        twice = _first_repeated(self.prompts)
        if twice is not None:
            raise FormatError(f"{twice.prompt[:60]!r} with seed {twice.seed} is there twice")

    def _check_statistics(self) -> None:
        if not isinstance(self.statistics, RunStatistics):
            raise FormatError("statistics must be RunStatistics")
        found = (self.statistics.num_prompts, self.statistics.num_steps)
        if found != (self.num_prompts, self.num_steps):
            raise FormatError(
                f"statistics are of {found[0]} prompts and {found[1]} steps, "
                f"but the profile has {self.num_prompts} and {self.num_steps}"
            )

    def _check_mergeable(self, other: Profile) -> None:
        differences = self.fingerprint.compare(other.fingerprint)
        if differences:
            listed = ", ".join(str(difference) for difference in differences)
            raise ProfileError(f"profiles of different runs cannot be merged: {listed}")
        if not torch.equal(self.sigmas, other.sigmas):
            raise ProfileError("profiles with different sigma schedules cannot be merged")
        if not torch.equal(self.nominal, other.nominal):
            raise ProfileError("profiles with different nominal updates cannot be merged")


def check_schedule(fingerprint: Fingerprint, sigmas: Tensor) -> None:
    """Raise unless ``sigmas`` is a valid sigma schedule, and the one of the fingerprint."""
    if not isinstance(fingerprint, Fingerprint):
        raise FormatError(f"fingerprint must be a Fingerprint, not {type(fingerprint).__name__}")
    check_sigmas(sigmas, num_steps=fingerprint.num_steps)
    if hash_sigmas(sigmas) != fingerprint.sigmas_hash:
        raise FormatError("sigmas is not the schedule whose hash is in the fingerprint")


def profile_shapes(num_steps: int, num_prompts: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a profile's tensors, packed as in the file, without the sigmas."""
    T, P = num_steps, num_prompts  # noqa: N806
    return {
        "inner": (P, (2 * T + 1) * (T + 1)),
        "means": (P, 2 * T + 1),
        "nominal": (T, 2),
        "output_l1": (P, T * (T + 1) // 2),
        "output_norm": (P, T),
        "residual_l1": (P, T * (T + 1) // 2),
        "residual_norm": (P, T),
    }


def take_prompts(value: list[Any]) -> list[tuple[ProfiledPrompt, int]]:
    """Return the runs of a header, each with the number of elements it was averaged over."""
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise FormatError(f"a profile has 1 to {MAX_PROMPTS} prompts, not {len(value)}")
    runs = []
    for place, entry in enumerate(value):
        record = take_record(entry, _PROMPT, f"prompts[{place}]")
        elements = check_count(f"prompts[{place}].elements", record["elements"], low=1)
        runs.append((ProfiledPrompt(record["prompt"], record["seed"]), elements))
    return runs


def check_expert_steps(value: object, num_steps: int) -> tuple[int, ...]:
    """Return the steps at which networks take over, ascending; raise if they are not valid."""
    if not isinstance(value, tuple | list):
        raise FormatError(f"expert_steps must be a tuple, got {type(value).__name__}")
    steps = {check_count("expert_steps", k, low=1, high=num_steps - 1) for k in value}
    return tuple(sorted(steps))


def read_expert_steps(provenance: Mapping[str, str]) -> tuple[tuple[int, ...], dict[str, str]]:
    """Take the expert steps out of a file's provenance: the steps, and the rest of it.

    Example:
        >>> read_expert_steps({"first steps of networks": "0 4", "seed": "1"})
        ((4,), {'seed': '1'})
    """
    rest = check_strings("provenance", provenance)
    words = rest.pop(_EXPERT_STEPS, "").split()
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise FormatError(f"the provenance {_EXPERT_STEPS!r} must list step numbers")
    return tuple(sorted({int(word) for word in words} - {0})), rest


def write_expert_steps(provenance: Mapping[str, str], steps: tuple[int, ...]) -> dict[str, str]:
    """Put expert steps into a file's provenance, where format versions 1 and 2 keep them.

    Example:
        >>> write_expert_steps({}, (4,))
        {'first steps of networks': '0 4'}
    """
    listed = {_EXPERT_STEPS: " ".join(map(str, (0, *steps)))} if steps else {}
    return dict(sorted((dict(provenance) | listed).items()))


def _merge_provenance(parts: list[Mapping[str, str]]) -> dict[str, str]:
    """All entries by name; where parts differ, each of their lines once."""
    lines: dict[str, dict[str, None]] = {}
    for name, text in (entry for part in parts for entry in part.items()):
        lines.setdefault(name, {}).update(dict.fromkeys(text.split("\n")))
    return {name: "\n".join(found) for name, found in lines.items()}


def _first_repeated(prompts: tuple[ProfiledPrompt, ...]) -> ProfiledPrompt | None:
    seen: set[ProfiledPrompt] = set()
    for record in prompts:
        if record in seen:
            return record
        seen.add(record)
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
