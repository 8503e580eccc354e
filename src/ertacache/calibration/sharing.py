"""Work on batches of runs: each batch is done by one process and once, its result comes to all.

Whole batches are what is divided, so that a network sees the same rows whatever the number of
processes, and results are put together in the order of batches: the outcome is the same to the bit.
What is finished is kept among the parts, and not done again after an interruption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ertacache
from ertacache.distributed import ALONE, Processes
from ertacache.formats.lock import locked
from ertacache.formats.parts import Parts, decode, encode
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.private_api import Pipeline

__all__ = [
    "Evaluations",
    "Phase",
    "Record",
    "Sharing",
    "describe_pipeline",
    "find_parts",
    "first_numbers",
    "taking_up",
]

Phase = Literal["profile", "trial", "refit", "validation"]

Record = Mapping[str, Tensor]
"""What is found on a batch, as named tensors on the CPU."""

Runs = Sequence[ProfiledPrompt]
COUNTED = "evaluations"  # name of the tensor that every record has besides its own
DIGESTED = 8  # numbers of every weight that are compared before work is continued


@dataclass
class Evaluations:
    """Network evaluations by phase, one for each prompt and computed step.

    A batch of eight prompts counts as eight; the branches of guidance, in one call of the network
    or in several, count as one. So the number does not depend on batches. Those of all processes
    are counted, and those of finished work that was taken up.

    Attributes:
        profile: the full runs of the calibration prompts.
        trial: solved plans, run on calibration prompts to measure how they are fitted best.
        refit: the closed-loop refit, or the paper's calibration runs.
        validation: the held-out prompts in all variants.

    Example:
        >>> nfe = Evaluations(profile=60)
        >>> nfe.add("validation", 25)
        >>> str(nfe)
        'profile 60 + trial 0 + refit 0 + validation 25 = 85'
    """

    profile: int = 0
    trial: int = 0
    refit: int = 0
    validation: int = 0

    def add(self, phase: Phase, count: int) -> None:
        """Count the evaluations of a phase."""
        setattr(self, phase, getattr(self, phase) + count)

    def add_all(self, counts: Tensor) -> None:
        """Count evaluations of all phases, shape (4,)."""
        for name, count in zip(vars(self), counts.tolist(), strict=True):
            setattr(self, name, getattr(self, name) + count)

    def take(self) -> Tensor:
        """The counts of all phases, shape (4,), int64; they begin again at 0."""
        found = torch.tensor(list(vars(self).values()))
        self.add_all(-found)
        return found

    @property
    def total(self) -> int:
        """All of them."""
        return self.profile + self.trial + self.refit + self.validation

    def __str__(self) -> str:
        """The sum in one line."""
        parts = " + ".join(f"{name} {count}" for name, count in vars(self).items())
        return f"{parts} = {self.total}"


class Sharing:
    """The processes of a session, and the finished work that they keep.

    Attributes:
        processes: those that share the work.
        parts: where finished work is kept; None keeps nothing.
    """

    def __init__(
        self,
        evaluations: Evaluations,
        *,
        processes: Processes = ALONE,
        parts: Parts | None = None,
        identity: Callable[[], str] = str,
    ) -> None:
        """Prepare to share work.

        Args:
            evaluations: where evaluations are counted, those of all processes.
            processes: those that share the work.
            parts: where finished work is kept.
            identity: describes what the work depends on besides runs; work of another is not
                taken up.
        """
        self.processes, self.parts, self._evaluations = processes, parts, evaluations
        self._identity = ""
        if parts is not None:
            mine = identity() if processes.is_main else ""
            self._identity = processes.from_main("identity", mine.encode()).decode()

    def key(self, name: str, runs: Runs, facts: object = ()) -> str:
        """The key of what is found on some runs; ``facts`` are what else it depends on."""
        what = [self._identity, name, [asdict(run) for run in runs], facts]
        text = json.dumps(what, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def share(
        self,
        name: str,
        batches: Sequence[Runs],
        work: Callable[[Runs], Record],
        *,
        facts: object = (),
        owners: Sequence[int] | None = None,
        kept: bool = True,
    ) -> Iterator[Record]:
        """What ``work`` finds on every batch, in the order of batches; the same in all processes.

        The processes take turns: each does one batch, then they exchange what they found.

        Args:
            name: of the work, the same in all processes.
            batches: all of them, the same in all processes.
            work: done on each of them by one process.
            facts: what the outcome depends on besides the runs.
            owners: the process of every batch; by default all have equally many to do.
            kept: whether what is found is kept among the parts.
        """
        keys = [self.key(name, batch, facts) for batch in batches]
        queues = self._divide(self._find(name, keys), len(batches), owners)
        ready: dict[int, dict[str, Tensor]] = {}
        following = 0
        for turn in range(max(map(len, queues))):
            found: dict[str, Tensor] | None = None
            for number in queues[self.processes.number][turn : turn + 1]:
                found = self._load(keys[number]) or self._do(batches[number], work)
                if kept and self.parts is not None:
                    self._save(keys[number], found)
            for queue, record in zip(queues, self._exchange(name, found), strict=True):
                if record is not None:
                    ready[queue[turn]] = record
            while following in ready:
                record = ready.pop(following)
                self._evaluations.add_all(record.pop(COUNTED))
                yield record
                following += 1

    def once(
        self, name: str, runs: Runs, work: Callable[[], Record], *, facts: object = ()
    ) -> Record:
        """What all processes find together, in one piece; the main process keeps it.

        Args:
            name: of the work.
            runs: what it is done on.
            work: done by all processes, with exchanges of its own; its result is that of the main
                process.
            facts: what the outcome depends on besides the runs.
        """
        key = self.key(name, runs, facts)
        known = self._load(key) if self.processes.is_main else None
        if self.parts is not None:
            known = self._exchange(f"{name} known", known)[0]
        if known is None:
            mine = self._do(runs, lambda _: work())
            all_found = [found for found in self._exchange(name, mine) if found is not None]
            known = all_found[0]
            known[COUNTED] = torch.stack([found[COUNTED] for found in all_found]).sum(0)
            if self.processes.is_main and self.parts is not None:
                self._save(key, known)
        found = dict(known)
        self._evaluations.add_all(found.pop(COUNTED))
        return found

    def gather(self, label: str, record: Record) -> dict[str, Tensor]:
        """The tensors of all processes, which have different names; the same in all of them."""
        joined: dict[str, Tensor] = {}
        for found in self._exchange(label, record):
            joined |= found or {}
        return joined

    def add_up(self, parts: Mapping[int, Tensor]) -> Tensor:
        """The sum of the parts of all processes, in the order of their numbers."""
        found = self.gather("sum", {str(number): part for number, part in parts.items()})
        joined = {int(name): part for name, part in found.items()}
        first, *others = (joined[number] for number in sorted(joined))
        for part in others:
            first = first + part
        return first

    def note_done(self, name: str, batch: Runs, facts: object = ()) -> None:
        """Leave of a kept part only its count: what was found is in its file."""
        if self.parts is not None:
            key = self.key(name, batch, facts)
            known = self.parts.load(key, COUNTED)
            if known is not None:
                self.parts.save(key, known)

    def count_done(self, name: str, batches: Sequence[Runs], facts: object = ()) -> None:
        """Count the evaluations of batches whose results are in their file."""
        if self.parts is None:
            return
        seen = {}
        for number, batch in enumerate(batches):
            known = self.parts.load(self.key(name, batch, facts), COUNTED)
            if known is not None:
                seen[str(number)] = known[COUNTED]
        for count in self.gather(f"{name} done", seen).values():
            self._evaluations.add_all(count)

    def _do(self, batch: Runs, work: Callable[[Runs], Record]) -> dict[str, Tensor]:
        before = self._evaluations.take()
        try:
            found = dict(work(batch))
            found[COUNTED] = self._evaluations.take()
        finally:
            self._evaluations.add_all(before)
        return found

    def _load(self, key: str) -> dict[str, Tensor] | None:
        found = None if self.parts is None else self.parts.load(key)
        return found if found and len(found) > 1 else None

    def _save(self, key: str, record: Record) -> None:
        assert self.parts is not None
        if not self.parts.path(key).exists() or self._load(key) is None:
            self.parts.save(key, record)

    def _find(self, name: str, keys: Sequence[str]) -> dict[int, int]:
        """Numbers of batches that were done before, and the first process that sees each."""
        if self.parts is None:
            return {}
        seen = [number for number, key in enumerate(keys) if self._load(key) is not None]
        found = self._exchange(f"{name} kept", {"numbers": torch.tensor(seen, dtype=torch.int64)})
        where: dict[int, int] = {}
        for process, record in enumerate(found):
            for number in (record or {"numbers": torch.empty(0)})["numbers"].tolist():
                where.setdefault(int(number), process)
        return where

    def _divide(
        self, where: Mapping[int, int], count: int, owners: Sequence[int] | None
    ) -> list[list[int]]:
        """Numbers of the batches of every process, ascending."""
        queues: list[list[int]] = [[] for _ in range(self.processes.count)]
        turn = 0
        for number in range(count):
            if number in where:
                queues[where[number]].append(number)
            elif owners is not None:
                queues[owners[number]].append(number)
            else:
                queues[turn % self.processes.count].append(number)
                turn += 1
        return queues

    def _exchange(
        self, label: str, record: Mapping[str, Tensor] | None
    ) -> list[dict[str, Tensor] | None]:
        if self.processes.count == 1:
            return [None if record is None else dict(record)]
        found = self.processes.exchange(label, b"" if record is None else encode(record))
        return [decode(data) if data else None for data in found]


def find_parts(
    folder: str | PathLike[str] | None,
    *,
    beside: str | PathLike[str] | None,
    processes: Processes,
) -> Parts | None:
    """Where finished work is kept: in a folder, or in one beside a file if there is need for it.

    One process writes its file after every batch, and needs none but to take up what several left.
    """
    if folder is not None:
        return folder if isinstance(folder, Parts) else Parts(folder)
    if beside is None:
        return None
    parts = Parts(f"{fspath(beside)}.parts")
    return parts if processes.count > 1 or parts.folder.exists() else None


@contextmanager
def taking_up(parts: Parts | None, processes: Processes) -> Iterator[None]:
    """Let an error of one process end all; no other launch uses the parts, which go at the end."""
    with processes.together(), ExitStack() as stack:
        if parts is not None and processes.is_main:
            stack.enter_context(locked(parts.folder))
        yield
    if parts is not None and not parts.lasting:
        parts.remove()


def describe_pipeline(pipe: Pipeline, call: Mapping[str, Any], batch_size: int) -> str:
    """What the result of a run depends on besides prompt and seed, as a string.

    Of weights only the first numbers are looked at: enough to see a LoRA, another checkpoint, or
    another number type.
    """
    digest, parts = hashlib.sha256(), dict(getattr(pipe, "components", vars(pipe)))
    for name, part in sorted(parts.items()):
        digest.update(f"{name} {type(part).__name__} {getattr(part, 'config', '')}".encode())
        if isinstance(part, nn.Module):
            for weight, values in part.named_parameters():
                digest.update(f"{weight} {values.dtype} {first_numbers(values)}".encode())
    facts = {
        "pipeline": type(pipe).__name__,
        "parts": digest.hexdigest(),
        "call": {name: _plain(value) for name, value in call.items()},
        "batch_size": batch_size,
        "versions": [ertacache.__version__, torch.__version__],
    }
    return json.dumps(facts, sort_keys=True, default=str)


def first_numbers(values: Tensor) -> list[float]:
    """The first few numbers of a weight, which tell it from another one; none if it is on disk."""
    if values.is_meta or not values.numel():  # on disk, with some ways of offloading
        return []
    first = values.detach()
    while first.ndim > 1:  # no reshape, which may copy all of it
        first = first[0]
    found: list[float] = first.reshape(-1)[:DIGESTED].float().tolist()
    return found


def _plain(value: Any) -> object:
    """A value as JSON takes it; an image or a tensor by its bytes."""
    if isinstance(value, Tensor):
        return hashlib.sha256(repr(value.tolist()).encode()).hexdigest()
    if hasattr(value, "tobytes"):
        return hashlib.sha256(value.tobytes()).hexdigest()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
