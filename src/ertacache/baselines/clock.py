"""Where a run is: its step, and which call of the network within the step.

Reported by the integration's tracker. With sequential
guidance a step has two calls, which must not share a cache. All that a method keeps during a run is
one object, created when a run starts and dropped when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from ertacache.baselines.base import BaselineStats
from ertacache.integration.identity import find_denoisers
from ertacache.integration.private_api import Pipeline
from ertacache.integration.run import held_bytes
from ertacache.integration.tracker import NetworkCall, StepCall, Tracker

__all__ = ["BaselineRun", "Clock", "first_tensor", "with_first_tensor"]


class BaselineRun:
    """One run of a pipeline under a method, and all that the method keeps during it.

    Attributes:
        step: the present step, from 0.
        branch: the present call of the network within its step, from 0.
        computed: units computed so far, such as blocks.
        reused: units reused so far.
    """

    def __init__(self) -> None:
        """Start before the first call of step 0."""
        self.step, self.branch = 0, -1
        self.computed = self.reused = 0

    def call(self, call: NetworkCall) -> Any:
        """Return the output for a call of the network; by default the call is made."""
        return call.compute()

    def advance(self, call: StepCall) -> Any:
        """Return what ``scheduler.step`` is to return; by default its own step is taken."""
        return call.original_step()

    def cached(self) -> Iterable[Any]:
        """Return what is kept for reuse; its memory is measured before the last step."""
        return ()

    def end(self) -> None:
        """Do what the method does after the last step of a complete run."""


RunT = TypeVar("RunT", bound=BaselineRun)


class Clock(Generic[RunT]):
    """Follows the runs of a pipeline until ``remove``.

    Attributes:
        run: the present run, None outside of one.
        num_steps: steps of the present or last run.
    """

    def __init__(
        self, pipe: Pipeline, make_run: Callable[[], RunT], *, num_steps: int | None = None
    ) -> None:
        """Track the pipeline's scheduler and networks.

        Args:
            pipe: the pipeline.
            make_run: called when a run starts, whatever became of the one before.
            num_steps: the steps every run has to have; None allows any number.
        """
        self.run: RunT | None = None
        self.num_steps = num_steps or 0
        self._fixed = num_steps is not None
        self._make_run = make_run
        self._scheduler = pipe.scheduler
        self._computed = self._reused = self._cached_bytes = 0  # of the runs that are over
        self._tracker = Tracker(pipe, find_denoisers(pipe), start=self._start, owner=self)

    def stats(self, unit: str) -> BaselineStats:
        """Return what was computed and reused in all runs, the present one included."""
        run = self.run or BaselineRun()
        computed, reused = self._computed + run.computed, self._reused + run.reused
        return BaselineStats(unit, computed, reused, self._cached_bytes)

    def remove(self) -> None:
        """Leave the scheduler and the networks as they were."""
        self._tracker.remove()

    def finish(self, run: RunT, cached_bytes: int) -> None:
        """Count a run that is over, complete or not."""
        self._computed += run.computed
        self._reused += run.reused
        self._cached_bytes = max(self._cached_bytes, cached_bytes)
        self.run = None

    def _start(self) -> _ClockFollower[RunT]:
        steps = len(self._scheduler.timesteps)
        if self._fixed and steps != self.num_steps:
            raise ValueError(
                f"attached for runs of {self.num_steps} steps, but this one has {steps}: "
                f"attach again with num_inference_steps={steps}"
            )
        self.num_steps = steps
        self.run = self._make_run()
        return _ClockFollower(self, self.run)


class _ClockFollower(Generic[RunT]):
    """Keeps a run's step and branch up to date."""

    def __init__(self, clock: Clock[RunT], run: RunT) -> None:
        self.num_steps = clock.num_steps
        self._clock, self._run = clock, run
        self._cached_bytes = 0

    def call(self, call: NetworkCall) -> Any:
        self._run.branch = call.index
        return self._run.call(call)

    def step(self, call: StepCall) -> Any:
        run = self._run
        result = run.advance(call)
        run.step, run.branch = call.step + 1, -1
        if run.step == self.num_steps - 1:  # caches are full; once per run costs no time
            self._cached_bytes = held_bytes(run.cached())
        return result

    def end(self, *, failed: bool, restarted: bool) -> None:
        run = self._run
        del self._run  # the tracker may hold this object until the next run
        self._clock.finish(run, self._cached_bytes)
        if run.step == self.num_steps:
            run.end()

    def loop_left(self, *, failed: bool) -> None:
        """Nothing to report."""


def first_tensor(output: Any) -> Tensor:
    """Return the prediction within a network's output, whatever its structure.

    Example:
        >>> import torch
        >>> first_tensor((torch.ones(1), None))
        tensor([1.])
    """
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


def with_first_tensor(output: Any, tensor: Tensor) -> Any:
    """Return a network's output with another prediction in it; the given one is not changed.

    Example:
        >>> import torch
        >>> with_first_tensor((torch.ones(1), None), torch.zeros(1))
        (tensor([0.]), None)
    """
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    return replace(output, **{fields(output)[0].name: tensor})  # an output class of diffusers
