"""The journal of a benchmark, from which an interrupted one resumes.

One line of JSON per finding: parameter values tried, policies, costs, and every batch of every
contestant. The first line holds the settings; a journal of other settings is refused. Policies are
files in a folder beside it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ertacache.formats.files import append_whole, write_whole
from ertacache.formats.policy import Policy

__all__ = ["Cost", "Journal", "Record"]


@dataclass(frozen=True)
class Record:
    """One contestant on one batch.

    Attributes:
        method: name of the method.
        budget: its target speed-up.
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
    """The cost of a contestant besides time.

    Attributes:
        method: name of the method.
        budget: its target speed-up.
        flops: of the denoising networks, on one batch.
        held: bytes of tensors allocated since the start, in the second half of the run.
    """

    method: str
    budget: float
    flops: int
    held: int


@dataclass(frozen=True)
class _Trial:
    """FLOPs of a baseline with its parameter at a value."""

    method: str
    value: float
    flops: int


@dataclass(frozen=True)
class _SavedPolicy:
    """A policy in the folder."""

    method: str
    budget: float
    file: str


_Finding = Record | Cost | _Trial | _SavedPolicy
_KINDS = {"record": Record, "cost": Cost, "turn": _Trial, "made": _SavedPolicy}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Journal:
    """The findings so far, appended to a file; without a path, in memory only."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Open a journal, or start one.

        Raises:
            ValueError: the journal at ``path`` has other settings.
        """
        self._path = path
        self._records: list[Record] = []
        self._costs: dict[tuple[str, float], Cost] = {}
        self._trials: dict[tuple[str, float], int] = {}
        self._policies: dict[tuple[str, float], Policy] = {}
        if path is not None and path.exists():
            self._read(path, settings)
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(dict(settings)) + "\n")

    def _read(self, path: Path, settings: Mapping[str, Any]) -> None:
        # The last line has no end if an interruption cut it off; it is measured again.
        *lines, cut = path.read_bytes().split(b"\n")
        try:
            first, *others = [json.loads(line) for line in lines]
            findings = [_KINDS[fields.pop("kind")](**fields) for fields in others]
            known = first == json.loads(json.dumps(dict(settings)))
        except (ValueError, KeyError, TypeError, AttributeError):
            known = False
        if not known:
            raise ValueError(
                f"{str(path)!r} belongs to a benchmark with other settings or versions: "
                "delete it to start over, or write to another file"
            )
        for finding in findings:
            self._apply(finding)
        if cut:
            write_whole(path, b"".join(line + b"\n" for line in lines))

    def _apply(self, finding: _Finding) -> None:
        match finding:
            case Record():
                self._records.append(finding)
            case Cost(method, budget):
                self._costs[method, budget] = finding
            case _Trial(method, value, flops):
                self._trials[method, value] = flops
            case _SavedPolicy(method, budget, file) if (path := self._folder() / file).exists():
                self._policies[method, budget] = Policy.load(path)

    def snapshot(self) -> bytes:
        """Everything in it, for another process."""
        trials = [_Trial(*key, flops) for key, flops in self._trials.items()]
        findings: list[_Finding] = [*self._records, *self._costs.values(), *trials]
        policies = [
            [*key, b64encode(policy._to_bytes()).decode()] for key, policy in self._policies.items()
        ]
        return json.dumps([[(_NAMES[type(f)], asdict(f)) for f in findings], policies]).encode()

    def restore(self, data: bytes) -> None:
        """Take over the snapshot of another process, into memory; nothing if it has a file."""
        if self._path is None:
            findings, policies = json.loads(data)
            for kind, fields in findings:
                self._apply(_KINDS[kind](**fields))
            for method, budget, text in policies:
                policy = Policy._from_bytes(b64decode(text), "the journal")
                self._policies[method, budget] = policy

    def _append(self, finding: _Finding) -> None:
        self._apply(finding)
        if self._path is not None:
            line = {"kind": _NAMES[type(finding)]} | asdict(finding)
            append_whole(self._path, json.dumps(line) + "\n")

    def _folder(self) -> Path:
        assert self._path is not None
        return self._path.with_suffix("").with_suffix(".policies")

    def add(self, record: Record) -> None:
        """Add a record."""
        self._append(record)

    def has(self, method: str, budget: float, batch: int) -> bool:
        """Whether a contestant was measured on a batch."""
        return any((r.method, r.budget, r.batch) == (method, budget, batch) for r in self._records)

    def records(self, method: str, budget: float) -> list[Record]:
        """The records of a contestant."""
        return [r for r in self._records if (r.method, r.budget) == (method, budget)]

    def cost(self, method: str, budget: float, measure: Callable[[], tuple[int, int]]) -> Cost:
        """The cost of a contestant: as recorded, or FLOPs and bytes measured now."""
        if (method, budget) not in self._costs:
            self._append(Cost(method, budget, *measure()))
        return self._costs[method, budget]

    def flops(self, method: str, value: float, measure: Callable[[], int]) -> int:
        """FLOPs of a method with its parameter at a value: as recorded, or measured now."""
        if (method, value) not in self._trials:
            self._append(_Trial(method, value, measure()))
        return self._trials[method, value]

    def policy(self, method: str, budget: float) -> Policy | None:
        """The policy of a contestant, if there is one."""
        return self._policies.get((method, budget))

    def add_policy(self, method: str, budget: float, policy: Policy) -> None:
        """Add a policy."""
        self._policies[method, budget] = policy
        if self._path is not None:
            name = f"{method} {budget:g}x.safetensors".replace(" ", "-").replace(",", "")
            self._folder().mkdir(exist_ok=True)
            policy.save(self._folder() / name)
            self._append(_SavedPolicy(method, budget, name))
