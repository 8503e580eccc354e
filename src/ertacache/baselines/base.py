"""The interface of every baseline: a name, one parameter, calibrate, attach and detach.

A baseline is another method to make a pipeline faster. Its rule is in the file with its name; what
it needs to know of a network is in ``architectures``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from ertacache.integration.private_api import Pipeline

__all__ = [
    "Baseline",
    "BaselineHandle",
    "BaselineStats",
    "NotApplicableError",
    "Parameter",
    "RunPrompts",
    "search_parameter",
]

RunPrompts = Callable[[], None]
"""Generates the calibration prompts, one call of the pipeline after the other."""


class NotApplicableError(ValueError):
    """A method cannot work with a pipeline; the message says why."""


@dataclass(frozen=True)
class BaselineStats:
    """What an attached baseline computed and reused so far, in the unit that it saves.

    Attributes:
        unit: what is counted, such as ``"network calls"``, ``"blocks"`` or ``"attention layers"``.
        computed: how many were computed.
        reused: how many were replaced by something cached.
        cached_bytes: memory held for reuse before the last step of a run, the maximum of all runs.
    """

    unit: str
    computed: int
    reused: int
    cached_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Parameter:
    """The number that trades speed for quality, and its range.

    Attributes:
        name: its name in the words of the method; results files contain it.
        low: smallest value that makes sense.
        high: largest value that makes sense.
        saves: whether a larger value computes less.
        integer: whether only whole numbers are valid.
        counts_steps: whether the value is the number of steps on which the network is computed.
    """

    name: str
    low: float
    high: float
    saves: bool
    integer: bool = False
    counts_steps: bool = False

    def check(self, value: float) -> float:
        """Return ``value``, or raise if it is out of range.

        Example:
            >>> Parameter("interval", 1, 10, saves=True, integer=True).check(3)
            3
        """
        if not self.low <= value <= self.high:
            raise ValueError(f"{self.name} must be from {self.low} to {self.high}, got {value}")
        if self.integer and value != int(value):
            raise ValueError(f"{self.name} must be a whole number, got {value}")
        return value

    def between(self, a: float, b: float, share: float) -> float:
        """The next value to try between two others; thresholds, which span decades, by ratio.

        Args:
            a: one of the two.
            b: the other.
            share: where the target cost lies from that of ``a`` to that of ``b``. Integers are
                interpolated, for their cost is nearly linear; the cost of a threshold jumps, so
                that it is bisected.

        Example:
            >>> Parameter("threshold", 1e-4, 1, saves=True).between(1e-4, 1, 0.3)
            0.01
            >>> Parameter("steps", 1, 30, saves=False, integer=True).between(30, 1, 0.3)
            21
        """
        if self.integer:
            low, high = sorted((int(a), int(b)))
            return min(max(round(a + share * (b - a)), low + 1), max(high - 1, low))
        if self.low > 0 and self.high / self.low >= 100:
            return math.sqrt(a * b)
        return (a + b) / 2


def search_parameter(
    parameter: Parameter,
    ratio: Callable[[float], float],
    target: float,
    *,
    tolerance: float = 0.03,
    tries: int = 16,
) -> tuple[float, float]:
    """Bisect a parameter to a compute ratio; return the best value tried and its ratio.

    Args:
        parameter: range and direction.
        ratio: measures the share of the full compute that a value leaves, such as 0.5.
        target: the desired share.
        tolerance: allowed deviation, relative to the target.
        tries: maximal number of measurements. A method that cannot reach the target ends at a
            bound.

    Example:
        >>> every = Parameter("every", 1, 9, saves=True, integer=True)
        >>> search_parameter(every, lambda n: 1 / n, 0.3)
        (3, 0.3333333333333333)
    """
    # The slow end computes most, the fast end least; they close in on the target.
    slow, fast = parameter.low, parameter.high
    if not parameter.saves:
        slow, fast = fast, slow
    tried = {fast: ratio(fast)}
    if tried[fast] < target:
        tried[slow] = ratio(slow)
        while len(tried) < tries and min(abs(r - target) for r in tried.values()) > (
            tolerance * target
        ):
            share = (tried[slow] - target) / max(tried[slow] - tried[fast], 1e-9)
            value = parameter.between(slow, fast, share)
            if value in tried:
                break
            tried[value] = ratio(value)
            slow, fast = (slow, value) if tried[value] < target else (value, fast)
    best = min(tried, key=lambda value: abs(tried[value] - target))
    return best, tried[best]


class BaselineHandle(AbstractContextManager["BaselineHandle"]):
    """A baseline attached to a pipeline, until ``detach()`` or the end of a ``with`` block."""

    def __init__(self, undo: ExitStack, stats: Callable[[], BaselineStats]) -> None:
        """Take over what is to be undone; ``stats`` counts up to the moment it is called."""
        self._undo, self._stats = undo, stats

    def detach(self) -> None:
        """Give the pipeline its own behaviour back, also in the middle of a run."""
        self._undo.close()

    def __exit__(self, *error: object) -> None:
        """Detach."""
        self.detach()

    @property
    def stats(self) -> BaselineStats:
        """What was computed and reused so far, over all runs."""
        return self._stats()


@dataclass(frozen=True)
class Baseline(ABC):
    """A method to compare with. Instances are values: ``calibrate`` returns a new one.

    Subclasses implement ``parameter`` and ``_attach``, and override the other two if needed.

    Attributes:
        name: its row in the tables. Results files and the command line use it as identifier, so
            that it never changes.
    """

    name: str

    def applies(self, pipe: Pipeline) -> str | None:
        """Return None, or the reason why it cannot work with this pipeline."""
        return None

    @abstractmethod
    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """Return what is set to trade speed for quality, with its range for this pipeline."""

    def calibrate(self, pipe: Pipeline, run_prompts: RunPrompts) -> Baseline:
        """Return the baseline with what it learns from full runs; most learn nothing."""
        return self

    def attach(self, pipe: Pipeline, value: float, *, num_inference_steps: int) -> BaselineHandle:
        """Make every run of ``num_inference_steps`` steps use the method, until detached.

        Args:
            pipe: the pipeline.
            value: the setting of ``parameter``.
            num_inference_steps: steps of every run.

        Raises:
            NotApplicableError: the method cannot work with this pipeline.
            ValueError: the value is out of range, or the baseline needs ``calibrate`` first.
        """
        reason = self.applies(pipe)
        if reason is not None:
            raise NotApplicableError(reason)
        self.parameter(pipe, num_inference_steps=num_inference_steps).check(value)
        return self._attach(pipe, value, num_inference_steps)

    @abstractmethod
    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Attach with a setting that was checked, to a pipeline to which the method applies."""
