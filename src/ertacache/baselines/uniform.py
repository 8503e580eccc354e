"""Uniform reuse: evenly spread steps are computed, the others extrapolate the last raw outputs.

The simplest caches, without any calibration. Of order 0 a reused step returns the last output; of
order 1 and 2 it continues the polynomial through the last two and three. Raw outputs are cached
call by call, so that guidance is applied to them as the pipeline does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter
from ertacache.baselines.clock import BaselineRun, Clock, first_tensor, with_first_tensor
from ertacache.core.plans import uniform_schedule
from ertacache.core.simulate import prior_weights
from ertacache.core.steppers import combine
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["ReplayRun", "Uniform"]


@dataclass(frozen=True)
class Uniform(Baseline):
    """Extrapolation of the whole output on all but evenly spread steps.

    Attributes:
        name: its row in the tables.
        order: of the polynomial, 0 to 2.
        compute_steps: computed instead of evenly spread ones, if given.
    """

    name: str = "uniform"
    order: int = 0
    compute_steps: tuple[int, ...] = ()

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of computed steps."""
        return Parameter(
            "computed steps", 1, num_inference_steps, saves=False, integer=True, counts_steps=True
        )

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Compute ``value`` steps of a run, the first and the last among them."""
        steps = self.compute_steps or uniform_schedule(num_steps, int(value))
        with ExitStack() as undo:
            clock = Clock(pipe, lambda: ReplayRun(steps, self.order), num_steps=num_steps)
            undo.callback(clock.remove)
            return BaselineHandle(undo.pop_all(), lambda: clock.stats("network calls"))


class ReplayRun(BaselineRun):
    """Runs the network on computed steps, and extrapolates its outputs of the branch on others."""

    def __init__(self, compute_steps: Collection[int], order: int = 0) -> None:
        """Start without an output."""
        super().__init__()
        self._compute_steps, self._order = frozenset(compute_steps), order
        self._outputs: dict[int, deque[tuple[int, Any]]] = {}  # newest first, with their steps

    def call(self, call: NetworkCall) -> Any:
        """Compute or extrapolate a call."""
        kept = self._outputs.setdefault(self.branch, deque(maxlen=self._order + 1))
        if self.step in self._compute_steps or not kept:
            kept.appendleft((self.step, call.compute()))
            self.computed += 1
            return kept[0][1]
        self.reused += 1
        if len(kept) == 1:
            return kept[0][1]
        steps = np.array([[step for step, _ in kept]])
        weights: list[float] = prior_weights(steps, self.step, order=self._order)[0].tolist()
        newest, *others = (first_tensor(output) for _, output in kept)
        forecast = combine(newest.float(), others, weights).to(newest.dtype)
        return with_first_tensor(kept[0][1], forecast)

    def cached(self) -> Iterable[Any]:
        """Return the last outputs."""
        return [output for kept in self._outputs.values() for _, output in kept]
