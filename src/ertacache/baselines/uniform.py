"""Uniform reuse: a few steps spread evenly are computed, the others replay the last raw output.

The plainest cache there is. Replays whole outputs of the network, call by call, so guidance is
whatever the pipeline makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ertacache.baselines.clock import Clock
from ertacache.baselines.interface import Handle, Knob, Runs, Stats
from ertacache.core.threshold import uniform_schedule
from ertacache.integration.compat import Pipeline

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform:
    """Reuse of the whole output on all but evenly spread steps."""

    name: str = "uniform"

    def applies(self, pipe: Pipeline) -> str | None:
        """It works with every pipeline."""
        return None

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The number of computed steps."""
        return Knob("computed steps", 1, num_inference_steps, saves=False, integer=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> Uniform:
        """There is nothing to learn."""
        return self

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Compute ``knob`` steps of a run, the first and the last among them."""
        steps = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        replay = _Replay(frozenset(uniform_schedule(num_inference_steps, int(steps))))
        clock = Clock(pipe, num_steps=num_inference_steps, around=replay)
        replay.follow(clock)
        with ExitStack() as undo:
            undo.callback(replay.outputs.clear)
            undo.callback(clock.remove)
            kept = undo.pop_all()

        def stats() -> Stats:
            reused = clock.calls - replay.computed
            return Stats("network calls", replay.computed, reused, clock.cached_bytes)

        return Handle(kept, stats)


class _Replay:
    """Runs the network on computed steps, and returns its last output of the branch on others."""

    def __init__(self, compute_steps: frozenset[int]) -> None:
        self.outputs: dict[int, Any] = {}
        self.computed = 0
        self._compute_steps = compute_steps
        self._clock: Clock | None = None

    def follow(self, clock: Clock) -> None:
        self._clock = clock
        clock.at_start(self.outputs.clear)
        clock.weigh(self.outputs.values)

    def __call__(self, compute: Callable[[], Any]) -> Any:
        assert self._clock is not None
        branch = self._clock.branch
        if self._clock.step in self._compute_steps or branch not in self.outputs:
            self.outputs[branch] = compute()
            self.computed += 1
        return self.outputs[branch]
