"""Where a run is: its step, and which call of the network within the step.

Pipelines tell neither: the scheduler's two methods and a hook on the network do. With sequential
guidance a step has two calls, which must not share a cache. Knows no method and no block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor, nn

from ertacache.integration.compat import HookSeat, ModelHook, Pipeline
from ertacache.integration.fingerprints import find_denoisers
from ertacache.integration.run import held_bytes
from ertacache.integration.scheduler import SchedulerPatch, StepCall

__all__ = ["Around", "Clock", "Compute", "first_tensor"]


class Compute(Protocol):
    """A call of the network that is about to be made."""

    @property
    def batch(self) -> int:
        """The rows of its batch."""
        ...

    def __call__(self, rows: slice | None = None) -> Any:
        """Make the call, with some rows of its batch only if ``rows`` are given."""
        ...


Around = Callable[[Compute], Any]
"""Stands around a call of the network: is given the call itself, returns an output."""


class Clock:
    """Follows the runs of a pipeline until ``remove``.

    Attributes:
        step: the present step, None outside a run.
        branch: the present call of the network within its step, from 0.
        num_steps: steps of the present run.
        calls: calls of the network in all runs.
        cached_bytes: memory held before the last step of a run, of all runs the most.
    """

    def __init__(
        self, pipe: Pipeline, *, num_steps: int | None = None, around: Around | None = None
    ) -> None:
        """Take the scheduler's methods and a hook on every network.

        Args:
            pipe: the pipeline.
            num_steps: the steps every run has to have; None takes what comes.
            around: called in place of the network within a run.
        """
        self.step: int | None = None
        self.branch = -1
        self.num_steps = num_steps or 0
        self._fixed = num_steps is not None
        self.calls = 0
        self._scheduler = pipe.scheduler
        self._at_start: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._at_call: list[Callable[[int], None]] = []
        self._held: list[Callable[[], Iterable[Any]]] = []
        self.cached_bytes = 0
        self._seats: list[HookSeat] = []
        with ExitStack() as undo:
            patch = SchedulerPatch(pipe.scheduler, on_start=self._start, on_step=self._take_step)
            undo.callback(patch.remove)
            for network in find_denoisers(pipe).values():
                seat = HookSeat(network, _CallHook(self, around))
                undo.callback(seat.remove)
                self._seats.append(seat)
            self._undo = undo.pop_all()

    def at_start(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when a run starts, whatever became of the one before."""
        self._at_start.append(call)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called after the last step of a complete run."""
        self._at_end.append(call)

    def at_call(self, call: Callable[[int], None]) -> None:
        """Have ``call`` called with the branch before every call of the network in a run."""
        self._at_call.append(call)

    def weigh(self, held: Callable[[], Iterable[Any]]) -> None:
        """Count what ``held`` returns among the memory that the method holds.

        Caches are full before the last step; weighed once per run, they cost no time.
        """
        self._held.append(held)

    def enter(self) -> None:
        """Count a call of the network that is about to be made."""
        self.branch += 1
        self.calls += 1
        for call in self._at_call:
            call(self.branch)

    def remove(self) -> None:
        """Leave the scheduler and the networks as they were."""
        self.step = None
        self._undo.close()

    def stop(self) -> None:
        """End the run, complete or not."""
        self.step, self.branch = None, -1

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
        for call in self._at_start:
            call()
        self.step = 0

    def _take_step(self, call: StepCall) -> Any:
        result = call.stock()
        if self.step is not None:
            self.step, self.branch = self.step + 1, -1
            if self.step == self.num_steps - 1:
                held = held_bytes(entry for tensors in self._held for entry in tensors())
                self.cached_bytes = max(self.cached_bytes, held)
            if self.step == self.num_steps:
                self.stop()
                for ended in self._at_end:
                    ended()
        return result


class _CallHook(ModelHook):
    def __init__(self, clock: Clock, around: Around | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock, self._around = clock, around

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        clock = self._clock
        if clock.step is None:
            return forward(*args, **kwargs)
        try:
            clock.enter()
            if self._around is None:
                return forward(*args, **kwargs)
            return self._around(_Call(forward, args, kwargs))
        except BaseException:
            clock.stop()
            raise


class _Call:
    """A ``Compute``; its rows are those of the first tensor among the arguments."""

    def __init__(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward, self._args, self._kwargs = forward, args, kwargs

    @property
    def batch(self) -> int:
        given = (*self._args, *self._kwargs.values())
        return len(next(one for one in given if isinstance(one, Tensor)))

    def __call__(self, rows: slice | None = None) -> Any:
        if rows is None:
            return self._forward(*self._args, **self._kwargs)
        batch = self.batch

        def part(given: Any) -> Any:
            whole = isinstance(given, Tensor) and given.ndim > 0 and len(given) == batch
            return given[rows] if whole else given

        args = [part(given) for given in self._args]
        return self._forward(*args, **{name: part(v) for name, v in self._kwargs.items()})


def first_tensor(output: Any) -> Tensor:
    """Return the prediction within a network's output, whatever its structure.

    Example:
        >>> import torch
        >>> first_tensor((torch.ones(1), None))
        tensor([1.])
    """
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
