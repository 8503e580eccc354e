"""Where a run is, what it remembers of the network, and what it cost.

The denoiser's hook and the scheduler's step meet here: the hook decides once per step, at the first
call of that step, and the step moves on. Knows no method and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.formats.policy import PolicyError

__all__ = ["Run", "RunStats", "Stats", "held_bytes", "input_shapes", "move"]

Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True)
class RunStats:
    """What one run, or all of them together, did.

    Attributes:
        computed_steps: steps on which the network ran, for all calls that the step made.
        reused_steps: the others.
        denoiser_calls: calls of the network, several per step with sequential guidance.
        denoiser_seconds: host time in the network; on an accelerator that runs asynchronously, the
            time it took to hand the work over.
        cached_bytes: memory held for reuse; of all runs, the most.

    Example:
        >>> RunStats(10, 20, 10, 1.5, 4096) + RunStats(10, 20, 10, 1.25, 1024)
        RunStats(computed_steps=20, reused_steps=40, denoiser_calls=20, denoiser_seconds=2.75, \
cached_bytes=4096)
    """

    computed_steps: int = 0
    reused_steps: int = 0
    denoiser_calls: int = 0
    denoiser_seconds: float = 0.0
    cached_bytes: int = 0

    def __add__(self, other: RunStats) -> RunStats:
        """Add up counts and seconds, and keep the larger memory."""
        return RunStats(
            self.computed_steps + other.computed_steps,
            self.reused_steps + other.reused_steps,
            self.denoiser_calls + other.denoiser_calls,
            self.denoiser_seconds + other.denoiser_seconds,
            max(self.cached_bytes, other.cached_bytes),
        )


@dataclass(frozen=True)
class Stats:
    """What an attached pipeline did.

    Attributes:
        runs: number of runs, the present one included.
        last: the present or last run.
        total: all runs together.
    """

    runs: int
    last: RunStats
    total: RunStats


class Run:
    """The state of one handle; between runs ``step`` is None and nothing is remembered."""

    def __init__(
        self,
        compute_steps: Iterable[int],
        *,
        num_steps: int,
        per_module: bool,
        cache_device: torch.device | None,
        held: Callable[[], Iterable[Tensor]],
        check: Callable[[int | None], None],
    ) -> None:
        """Prepare for runs of ``num_steps`` steps.

        Args:
            compute_steps: the steps on which the network is to run.
            num_steps: number of steps T.
            per_module: whether a step that is to be reused, but goes to another module than the
                one that ran last, is computed instead; otherwise it is an error.
            cache_device: where remembered outputs are kept; None leaves them where they are.
            held: the tensors that the method remembers, for the count of bytes.
            check: called with the step before its first call of the network, and with None before
                any call outside a run.
        """
        self.step: int | None = None
        self.reusing = False
        self.calls = 0  # in the present step
        self.expected = 0  # calls of the last computed step
        self.reshaped = False  # the present step's input is not what was remembered
        self._computed = frozenset(compute_steps)
        self._num_steps = num_steps
        self._per_module = per_module
        self._device = cache_device
        self._held = held
        self._check = check
        self._owner: nn.Module | None = None
        self._outputs: dict[int, Any] = {}
        self._shapes: Shapes = ()
        self._fresh = 0  # calls of the present step that were computed
        self._origin: torch.device | None = None
        self._runs, self._last, self._before = 0, RunStats(), RunStats()

    @property
    def number(self) -> int:
        """How many runs have begun."""
        return self._runs

    @property
    def stats(self) -> Stats:
        """Counts so far."""
        self._count_bytes()
        return Stats(self._runs, self._last, self._before + self._last)

    def follow(self, compute_steps: Iterable[int], *, num_steps: int) -> None:
        """Take another plan, before the first call of a run or after it, which is computed."""
        self._computed, self._num_steps = frozenset(compute_steps), num_steps

    def compute_rest(self) -> None:
        """Compute the present step, whose output is fresh, and all that follow."""
        self._computed, self.reusing = frozenset(range(self._num_steps)), False

    def start(self) -> None:
        """Begin a run, whatever became of the one before."""
        self.close()
        self._before += self._last
        self._runs, self._last = self._runs + 1, RunStats()
        self.step, self.calls, self.expected = 0, 0, 0

    def close(self) -> None:
        """End the run, complete or not, and let go of what it remembers of the network."""
        self._count_bytes()
        self.step, self.reusing, self.calls = None, False, 0
        self._fresh, self.reshaped = 0, False
        self._owner, self._outputs, self._shapes = None, {}, ()

    def enter(self, module: nn.Module, shapes: Shapes = ()) -> int | None:
        """Return the number of this call of the network within its step; None outside a run.

        Args:
            module: the network.
            shapes: of its input; what was said to an input of another shape is not reused.
        """
        if self.calls == 0:
            self._check(self.step)
        if self.step is None:
            return None
        if self.calls == 0:
            self._decide(module, shapes)
        self.calls += 1
        return self.calls - 1

    def _decide(self, module: nn.Module, shapes: Shapes) -> None:
        stranger, planned = self._owner is not module, self.step in self._computed
        if stranger and not planned and not self._per_module:
            raise PolicyError(
                f"the pipeline goes on with another network at step {self.step}, which the policy "
                "reuses, but a network has to begin with a computed step: calibrate again, or "
                f"solve the profile with pinned=[{self.step}]"
            )
        self.reusing = not planned and not stranger
        self.reshaped = self.reusing and shapes != self._shapes
        if not self.reusing or self.reshaped:
            self._owner, self._outputs, self._shapes = module, {}, shapes

    def has(self, call: int) -> bool:
        """Tell whether the present step reuses, and an output of this call is there."""
        return self.reusing and call in self._outputs

    def replay(self, call: int) -> Any:
        """Return the remembered output of a call, on the device it came from."""
        output = self._outputs[call]
        return output if self._origin is None else move(output, self._origin)

    def remember(self, call: int, output: Any, *, seconds: float) -> Any:
        """Keep the output of a call that was computed, and return it in memory of its own.

        A network may give its outputs in memory that its next call writes to, as CUDA graphs do.
        """
        self._fresh += 1
        output = _map(output, Tensor.clone)
        self._outputs[call] = output
        if self._device is not None:
            self._origin = next((tensor.device for tensor in _tensors(output)), None)
            self._outputs[call] = move(output, self._device)
        self._last = replace(
            self._last,
            denoiser_calls=self._last.denoiser_calls + 1,
            denoiser_seconds=self._last.denoiser_seconds + seconds,
        )
        return output

    def advance(self) -> bool:
        """Go to the next step; return whether there is none."""
        if self.step is None:
            raise RuntimeError("no run to advance")
        done = self._last
        if not self.reusing or self._fresh == self.calls:
            self._last = replace(done, computed_steps=done.computed_steps + 1)
            self.expected = self.calls
        else:
            self._last = replace(done, reused_steps=done.reused_steps + 1)
        self.step, self.calls, self.reusing = self.step + 1, 0, False
        self._fresh, self.reshaped = 0, False
        return self.step == self._num_steps

    def _count_bytes(self) -> None:
        if self.step is None:
            return
        held = held_bytes([*self._outputs.values(), *self._held()])
        if held > self._last.cached_bytes:
            self._last = replace(self._last, cached_bytes=held)


def input_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a network's latent, which all take first or by one of two names.

    Example:
        >>> input_shapes((torch.ones(2, 3), torch.ones(2)), {}), input_shapes((), {"sample": None})
        ((torch.Size([2, 3]),), ())
    """
    named = (kwargs[name] for name in ("hidden_states", "sample") if name in kwargs)
    latent = next(named, None)
    if latent is None:
        latent = next(iter((*args, *kwargs.values())), None)
    return tuple(tensor.shape for tensor in _tensors(latent))


def move(output: Any, device: torch.device) -> Any:
    """Return the output of a network with its tensors on ``device``, in the same structure."""
    return _map(output, lambda tensor: tensor.to(device))


def _map(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):  # also diffusers' output classes
        return type(output)(**{key: _map(value, change) for key, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)(_map(value, change) for value in output)
    return output


def held_bytes(outputs: Iterable[Any]) -> int:
    """Return the bytes behind nested outputs, memory shared by several tensors counted once.

    Example:
        >>> x = torch.zeros(4)
        >>> held_bytes([x, (x[:2], torch.zeros(1))])
        20
    """
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in _tensors(outputs)
    }
    return sum(storages.values())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, Iterable) and not isinstance(output, str):
        for entry in output:
            yield from _tensors(entry)
