"""Uniform reuse: evenly spread steps are computed, the others return the last raw output.

The simplest cache. It replays whole outputs of the network, call by call, so that guidance is
applied to them as the pipeline does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter
from ertacache.baselines.clock import BaselineRun, Clock
from ertacache.core.plans import uniform_schedule
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["ReplayRun", "Uniform"]


@dataclass(frozen=True)
class Uniform(Baseline):
    """Reuse of the whole output on all but evenly spread steps."""

    name: str = "uniform"

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of computed steps."""
        return Parameter(
            "computed steps", 1, num_inference_steps, saves=False, integer=True, counts_steps=True
        )

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Compute ``value`` steps of a run, the first and the last among them."""
        steps = frozenset(uniform_schedule(num_steps, int(value)))
        with ExitStack() as undo:
            clock = Clock(pipe, lambda: ReplayRun(steps), num_steps=num_steps)
            undo.callback(clock.remove)
            return BaselineHandle(undo.pop_all(), lambda: clock.stats("network calls"))


class ReplayRun(BaselineRun):
    """Runs the network on computed steps, and returns its last output of the branch on others."""

    def __init__(self, compute_steps: frozenset[int]) -> None:
        """Start without an output."""
        super().__init__()
        self._compute_steps = compute_steps
        self._outputs: dict[int, Any] = {}

    def call(self, call: NetworkCall) -> Any:
        """Compute or replay a call."""
        if self.step in self._compute_steps or self.branch not in self._outputs:
            self._outputs[self.branch] = call.compute()
            self.computed += 1
        else:
            self.reused += 1
        return self._outputs[self.branch]

    def cached(self) -> Iterable[Any]:
        """Return the last outputs."""
        return self._outputs.values()
