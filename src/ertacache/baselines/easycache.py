"""EasyCache (Zhou et al. 2025), with the rule and the settings of ComfyUI.

The last two computed steps give the change of the output per change of the input. That rate turns
the input's distance from the last computed one into an estimate of the output's. Estimates are
added up; below a threshold the output is the input plus the last ``output - input``. Before 15 %
and after 95 % of a run every step is computed.

The first call of a step decides for all of them, a batch as a whole. ComfyUI measures changes on
every eighth row and column, to save time; here on all of them, for small latents have fewer.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter
from ertacache.baselines.clock import BaselineRun, Clock, first_tensor, with_first_tensor
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["EasyCache", "EasyCacheRule"]


@dataclass(frozen=True)
class EasyCache(Baseline):
    """EasyCache.

    Attributes:
        name: its row in the tables.
        start: share of a run before which every step is computed.
        end: share of a run from which on every step is computed.
    """

    name: str = "EasyCache"
    start: float = 0.15
    end: float = 0.95

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The threshold of the accumulated change."""
        return Parameter("threshold", 1e-4, 100.0, saves=True)

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Reuse the difference of output and input under the threshold ``value``."""
        start, end = self.start * num_steps, self.end * num_steps

        def make_run() -> _DifferenceRun:
            return _DifferenceRun(EasyCacheRule(value, start, end))

        with ExitStack() as undo:
            clock = Clock(pipe, make_run, num_steps=num_steps)
            undo.callback(clock.remove)
            return BaselineHandle(undo.pop_all(), lambda: clock.stats("network calls"))


class EasyCacheRule:
    """Reuses while the accumulated estimate of the output's change is below the threshold."""

    def __init__(self, threshold: float, start: float, end: float) -> None:
        """Start with nothing known; steps from ``start`` on and before ``end`` may be reused."""
        self._threshold, self._start, self._end = threshold, start, end
        self._before: tuple[Tensor, Tensor] | None = None  # of the last computed step
        self._input_change: float | None = None  # since then
        self._rate: float | None = None  # change of the output per change of the input
        self._total = 0.0

    def reuses(self, step: int, x: Tensor) -> bool:
        """Decide a step from the network's input."""
        self._input_change = None
        if self._before is None or not self._start <= step < self._end:
            return False
        self._input_change = _distance(x, self._before[0])
        if self._rate is None:
            return False
        self._total += self._rate * self._input_change / max(_size(self._before[1]), 1e-12)
        if self._total < self._threshold:
            return True
        self._total = 0.0
        return False

    def computed(self, step: int, x: Tensor, v: Tensor) -> None:
        """Learn from the input and the output of a computed step."""
        if step >= self._end:
            return
        if self._before is not None and self._input_change:
            self._rate = _distance(v, self._before[1]) / self._input_change
        self._before = x, v


def _distance(a: Tensor, b: Tensor) -> float:
    return _size(a.float() - b.float())


def _size(x: Tensor) -> float:
    return x.float().abs().mean().item()


class _DifferenceRun(BaselineRun):
    """Evaluates the network, or adds to its last output what its input changed by since."""

    def __init__(self, rule: EasyCacheRule) -> None:
        super().__init__()
        self._rule, self._reusing = rule, False
        self._kept: dict[int, tuple[Tensor, Any]] = {}  # input and output by branch

    def call(self, call: NetworkCall) -> Any:
        x = _latent(call)
        if self.branch == 0:
            self._reusing = self._rule.reuses(self.step, x)
        if self._reusing and self.branch in self._kept:
            self.reused += 1
            before, output = self._kept[self.branch]
            return with_first_tensor(output, _add_change(first_tensor(output), x, before))
        output = call.compute()
        self.computed += 1
        self._kept[self.branch] = x, output
        if self.branch == 0:
            self._rule.computed(self.step, x, first_tensor(output))
        return output

    def cached(self) -> Iterable[Any]:
        return self._kept.values()


def _latent(call: NetworkCall) -> Tensor:
    """The latent among a network's arguments, which is the first tensor unless it has a name."""
    given = call.kwargs.get("hidden_states")
    if isinstance(given, Tensor):
        return given
    return next(one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor))


def _add_change(output: Tensor, x: Tensor, before: Tensor) -> Tensor:
    """Add ``x - before`` to an output, on the channels that both have.

    Networks may be given further channels, such as an image, or return some, such as a variance.

    Example:
        >>> import torch
        >>> _add_change(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0]]), torch.tensor([[2.0]]))
        tensor([[2., 5.]])
    """
    shared = tuple(slice(min(a, b)) for a, b in zip(output.shape, x.shape, strict=True))
    result = output.clone()
    result[shared] += (x[shared] - before[shared]).to(output.dtype)
    return result
