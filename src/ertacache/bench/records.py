"""What was measured, batch by batch, kept in a journal that an interrupted benchmark resumes from.

One line of JSON per batch and entry. The first line holds the settings: a journal of other settings
is refused, never mixed. Knows no method and no metric.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Record"]


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


class Journal:
    """The records so far, on disk as they come."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open a journal, or begin one.

        Raises:
            ValueError: there is a journal of other settings at ``path``.
        """
        self.path = path
        self._records: list[Record] = []
        if path.exists():
            self._read(settings)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(dict(settings), mode="w")

    def _read(self, settings: Mapping[str, Any]) -> None:
        # A line that was cut off by the interruption is not JSON and is measured again.
        lines = [line for line in self.path.read_text().splitlines() if line.endswith("}")]
        if not lines or json.loads(lines[0]) != json.loads(json.dumps(dict(settings))):
            raise ValueError(
                f"{str(self.path)!r} belongs to a benchmark with other settings or versions: "
                "delete it to start over, or write to another file"
            )
        self._records = [Record(**json.loads(line)) for line in lines[1:]]
        self.path.write_text("".join(line + "\n" for line in lines))

    def _append(self, value: Mapping[str, Any], *, mode: str = "a") -> None:
        with self.path.open(mode) as file:
            file.write(json.dumps(value) + "\n")

    def add(self, record: Record) -> None:
        """Keep a record."""
        self._append(asdict(record))
        self._records.append(record)

    def has(self, method: str, budget: float, batch: int) -> bool:
        """Whether an entry was measured on a batch."""
        return any((r.method, r.budget, r.batch) == (method, budget, batch) for r in self._records)

    def of(self, method: str, budget: float) -> Iterator[Record]:
        """The records of an entry."""
        return (r for r in self._records if (r.method, r.budget) == (method, budget))
