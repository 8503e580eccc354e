"""Where a run is: its step, and which call of the network within the step.

Pipelines report neither; the scheduler's two methods and a hook on each network do. With sequential
guidance a step has two calls, which must not share a cache. All that a method keeps during a run is
one object, created when a run starts and dropped when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ertacache.baselines.base import BaselineStats
from ertacache.integration.compat import HookSeat, ModelHook, Pipeline
from ertacache.integration.fingerprints import find_denoisers
from ertacache.integration.run import held_bytes
from ertacache.integration.scheduler import SchedulerPatch, StepCall

__all__ = ["BaselineRun", "Clock", "NetworkCall", "first_tensor"]


class NetworkCall:
    """A call of the network that is about to be made."""

    def __init__(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the call's arguments."""
        self._forward, self._args, self._kwargs = forward, args, kwargs

    @property
    def batch(self) -> int:
        """The rows of its batch: those of the first tensor among the arguments."""
        given = (*self._args, *self._kwargs.values())
        return len(next(one for one in given if isinstance(one, Tensor)))

    def __call__(self, rows: slice | None = None) -> Any:
        """Make the call, with some rows of its batch only if ``rows`` are given."""
        if rows is None:
            return self._forward(*self._args, **self._kwargs)
        batch = self.batch

        def part(given: Any) -> Any:
            whole = isinstance(given, Tensor) and given.ndim > 0 and len(given) == batch
            return given[rows] if whole else given

        args = [part(given) for given in self._args]
        return self._forward(*args, **{name: part(v) for name, v in self._kwargs.items()})


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
        return call()

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
        """Patch the scheduler's methods and hook every network.

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
        self._seats: list[HookSeat] = []
        with ExitStack() as undo:
            patch = SchedulerPatch(pipe.scheduler, on_start=self._start, on_step=self._take_step)
            undo.callback(patch.remove)
            for network in find_denoisers(pipe).values():
                seat = HookSeat(network, _CallHook(self))
                undo.callback(seat.remove)
                self._seats.append(seat)
            self._undo = undo.pop_all()

    def stats(self, unit: str) -> BaselineStats:
        """Return what was computed and reused in all runs, the present one included."""
        run = self.run or BaselineRun()
        computed, reused = self._computed + run.computed, self._reused + run.reused
        return BaselineStats(unit, computed, reused, self._cached_bytes)

    def stop(self) -> None:
        """End the run, complete or not."""
        if self.run is not None:
            self._computed += self.run.computed
            self._reused += self.run.reused
            self.run = None

    def remove(self) -> None:
        """Leave the scheduler and the networks as they were."""
        self.stop()
        self._undo.close()

    def _start(self) -> None:
        self.stop()
        steps = len(self._scheduler.timesteps)
        if not self._fixed:
            self.num_steps = steps
        elif steps != self.num_steps:
            raise ValueError(
                f"attached for runs of {self.num_steps} steps, but this one has {steps}: "
                f"attach again with num_inference_steps={steps}"
            )
        for seat in self._seats:
            seat.ensure()
        self.run = self._make_run()

    def _take_step(self, call: StepCall) -> Any:
        result = call.stock()
        run = self.run
        if run is not None:
            run.step, run.branch = run.step + 1, -1
            if run.step == self.num_steps - 1:  # caches are full; once per run costs no time
                self._cached_bytes = max(self._cached_bytes, held_bytes(run.cached()))
            if run.step == self.num_steps:
                self.stop()
                run.end()
        return result


class _CallHook(ModelHook):
    def __init__(self, clock: Clock[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        run: BaselineRun | None = self._clock.run
        if run is None:
            return forward(*args, **kwargs)
        try:
            run.branch += 1
            return run.call(NetworkCall(forward, args, kwargs))
        except BaseException:
            self._clock.stop()
            raise


def first_tensor(output: Any) -> Tensor:
    """Return the prediction within a network's output, whatever its structure.

    Example:
        >>> import torch
        >>> first_tensor((torch.ones(1), None))
        tensor([1.])
    """
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
