"""What every rival is to the benchmark: a name, a knob, attach and detach.

Knows no method, no network and no block; a rival's rule is in the file that carries its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from ertacache.integration.attachment import Attachment
from ertacache.integration.compat import Pipeline

__all__ = [
    "Baseline",
    "Handle",
    "Knob",
    "NotApplicableError",
    "Runs",
    "Stats",
    "require",
    "search_knob",
]

Runs = Callable[[], None]
"""Generates the calibration prompts, one call of the pipeline after the other."""


class NotApplicableError(ValueError):
    """A method cannot work with a pipeline; the text says why."""


def require(reason: str | None) -> None:
    """Raise if there is a reason why a method does not apply."""
    if reason is not None:
        raise NotApplicableError(reason)


@dataclass(frozen=True)
class Stats:
    """What an attached rival did so far, in the unit that it saves.

    Attributes:
        unit: what is counted, such as ``"network calls"``, ``"blocks"`` or ``"attention layers"``.
        computed: how many were computed.
        reused: how many were not, because something stood in for them.
        cached_bytes: memory held for reuse before the last step of a run, of all runs the most.
    """

    unit: str
    computed: int
    reused: int
    cached_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Knob:
    """The number that trades speed for quality, and where to look for it.

    Attributes:
        name: what is turned, in the method's own words.
        low: smallest value that makes sense.
        high: largest value that makes sense.
        saves: whether a larger value computes less.
        integer: whether only whole numbers count.
    """

    name: str
    low: float
    high: float
    saves: bool
    integer: bool = False

    def check(self, value: float) -> float:
        """Return ``value``, or say what is wrong with it.

        Example:
            >>> Knob("interval", 1, 10, saves=True, integer=True).check(3)
            3
        """
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.name} must be from {self.low} to {self.high}, got {value}")
        if self.integer and value != int(value):
            raise ValueError(f"{self.name} must be a whole number, got {value}")
        return value

    def between(self, a: float, b: float, share: float) -> float:
        """The value to try between two others; thresholds, which span decades, by their ratio.

        Args:
            a: one of the two.
            b: the other.
            share: where the wanted cost lies from that of ``a`` to that of ``b``. Counts are tried
                there, for their cost is nearly linear; that of a threshold jumps, and is bisected.

        Example:
            >>> Knob("threshold", 1e-4, 1, saves=True).between(1e-4, 1, 0.3)
            0.01
            >>> Knob("steps", 1, 30, saves=False, integer=True).between(30, 1, 0.3)
            21
        """
        if self.integer:
            low, high = sorted((int(a), int(b)))
            return min(max(round(a + share * (b - a)), low + 1), max(high - 1, low))
        if self.low > 0 and self.high / self.low >= 100:
            return math.sqrt(a * b)
        return (a + b) / 2


def search_knob(
    knob: Knob,
    ratio: Callable[[float], float],
    target: float,
    *,
    tolerance: float = 0.03,
    tries: int = 16,
) -> tuple[float, float]:
    """Bisect a knob to a compute ratio; return the best value tried and the ratio it gave.

    Args:
        knob: bounds and direction.
        ratio: measures the share of the full compute that a value leaves, such as 0.5.
        target: the share wanted.
        tolerance: how close is close enough, relative to the target.
        tries: measurements at most. A method that cannot reach the target ends at a bound.

    Example:
        >>> search_knob(Knob("every", 1, 9, saves=True, integer=True), lambda n: 1 / n, 0.3)
        (3, 0.3333333333333333)
    """
    gentle, bold = (knob.low, knob.high) if knob.saves else (knob.high, knob.low)
    tried = {bold: ratio(bold)}
    if tried[bold] < target:
        tried[gentle] = ratio(gentle)
        while len(tried) < tries and min(abs(r - target) for r in tried.values()) > (
            tolerance * target
        ):
            share = (tried[gentle] - target) / max(tried[gentle] - tried[bold], 1e-9)
            value = knob.between(gentle, bold, share)
            if value in tried:
                break
            tried[value] = ratio(value)
            gentle, bold = (gentle, value) if tried[value] < target else (value, bold)
    best = min(tried, key=lambda value: abs(tried[value] - target))
    return best, tried[best]


class Handle(Attachment):
    """A rival attached to a pipeline, until ``detach()`` or the end of a ``with`` block."""

    def __init__(self, undo: ExitStack, stats: Callable[[], Stats]) -> None:
        """Take over what is to be undone; ``stats`` counts up to the moment it is called."""
        super().__init__(undo)
        self._stats = stats

    @property
    def stats(self) -> Stats:
        """What was computed and reused so far, over all runs."""
        return self._stats()


class Baseline(Protocol):
    """A rival. Instances are values: ``calibrate`` returns another one and changes none."""

    @property
    def name(self) -> str:
        """Its row in the tables."""
        ...

    def applies(self, pipe: Pipeline) -> str | None:
        """Return None, or the sentence that says why it cannot work with this pipeline."""
        ...

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """Return what is turned, and its bounds for this pipeline."""
        ...

    def calibrate(self, pipe: Pipeline, runs: Runs) -> Baseline:
        """Return the rival with what it learns from untouched runs; most learn nothing."""
        ...

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Make every run of ``num_inference_steps`` steps use the method, until detached."""
        ...
