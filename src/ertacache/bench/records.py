"""What was found out so far, kept in a journal that an interrupted benchmark resumes from.

One line of JSON per finding: knobs tried, policies made, costs, and every batch of every entry. The
first line holds the settings: a journal of other settings is refused, never mixed. Policies are
files in a folder beside it. Knows no method and no metric.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ertacache.formats.policy import Policy

__all__ = ["Cost", "Journal", "Record"]


@dataclass(frozen=True)
class Record:
    """One entry on one batch.

    Attributes:
        method: name of the method.
        budget: the speed-up it was turned to.
        batch: number of the batch.
        seconds: of the whole call.
        scores: by metric, one value per prompt.
    """

    method: str
    budget: float
    batch: int
    seconds: float
    scores: Mapping[str, list[float]]


@dataclass(frozen=True)
class Cost:
    """What one entry costs besides time.

    Attributes:
        method: name of the method.
        budget: the speed-up it was turned to.
        flops: of the denoising networks, on one batch.
        held: bytes that came to be held up to the middle of the run.
    """

    method: str
    budget: float
    flops: int
    held: int


@dataclass(frozen=True)
class _Turn:
    """FLOPs that a method took with its knob at a value."""

    method: str
    value: float
    flops: int


@dataclass(frozen=True)
class _Made:
    """A policy that is in the folder."""

    method: str
    budget: float
    file: str


_Finding = Record | Cost | _Turn | _Made
_KINDS = {"record": Record, "cost": Cost, "turn": _Turn, "made": _Made}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Journal:
    """The findings so far, on disk as they come; without a path, in memory alone."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Open a journal, or begin one.

        Raises:
            ValueError: there is a journal of other settings at ``path``.
        """
        self.path = path
        self._records: list[Record] = []
        self._costs: dict[tuple[str, float], Cost] = {}
        self._turns: dict[tuple[str, float], int] = {}
        self._policies: dict[tuple[str, float], Policy] = {}
        if path is not None and path.exists():
            self._read(path, settings)
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dict(settings)) + "\n")

    def _read(self, path: Path, settings: Mapping[str, Any]) -> None:
        # A line that was cut off by the interruption is not JSON and is measured again.
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        found = [json.loads(line) for line in lines]
        known = all(fields.get("kind") in _KINDS for fields in found[1:])
        if not known or found[:1] != [json.loads(json.dumps(dict(settings)))]:
            raise ValueError(
                f"{str(path)!r} belongs to a benchmark with other settings or versions: "
                "delete it to start over, or write to another file"
            )
        for fields in found[1:]:
            self._take(_KINDS[fields.pop("kind")](**fields))
        path.write_text("".join(line + "\n" for line in lines))

    def _take(self, finding: _Finding) -> None:
        match finding:
            case Record():
                self._records.append(finding)
            case Cost(method, budget):
                self._costs[method, budget] = finding
            case _Turn(method, value, flops):
                self._turns[method, value] = flops
            case _Made(method, budget, file) if (path := self._folder() / file).exists():
                self._policies[method, budget] = Policy.load(path)

    def _keep(self, finding: _Finding) -> None:
        self._take(finding)
        if self.path is not None:
            line = {"kind": _NAMES[type(finding)]} | asdict(finding)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _folder(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix("").with_suffix(".policies")

    def add(self, record: Record) -> None:
        """Keep a record."""
        self._keep(record)

    def has(self, method: str, budget: float, batch: int) -> bool:
        """Whether an entry was measured on a batch."""
        return any((r.method, r.budget, r.batch) == (method, budget, batch) for r in self._records)

    def of(self, method: str, budget: float) -> Iterator[Record]:
        """The records of an entry."""
        return (r for r in self._records if (r.method, r.budget) == (method, budget))

    def cost(self, method: str, budget: float, measure: Callable[[], tuple[int, int]]) -> Cost:
        """What an entry costs: as known, or FLOPs and bytes measured now."""
        if (method, budget) not in self._costs:
            self._keep(Cost(method, budget, *measure()))
        return self._costs[method, budget]

    def flops(self, method: str, value: float, measure: Callable[[], int]) -> int:
        """FLOPs of a method with its knob at a value: as known, or measured now."""
        if (method, value) not in self._turns:
            self._keep(_Turn(method, value, measure()))
        return self._turns[method, value]

    def policy(self, method: str, budget: float) -> Policy | None:
        """The policy of an entry, if it was made."""
        return self._policies.get((method, budget))

    def keep_policy(self, method: str, budget: float, policy: Policy) -> None:
        """Keep a policy."""
        self._policies[method, budget] = policy
        if self.path is not None:
            name = f"{method} {budget:g}x.safetensors".replace(" ", "-").replace(",", "")
            self._folder().mkdir(exist_ok=True)
            policy.save(self._folder() / name)
            self._keep(_Made(method, budget, name))
