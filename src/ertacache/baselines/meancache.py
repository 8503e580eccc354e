"""MeanCache (Gao et al., ICLR 2026): average velocities on a shortest path of computed steps.

On a reused step from t to s the scheduler gets ``v - (s - t) JVP``. v is the last velocity, and JVP
the finite difference ``(v_r - u) / (t - r)``, with u the average velocity of the last K steps, from
r to t. Which steps are computed, and K between any two of them, is the shortest path through a run.
An edge costs the mean distance of its average velocity from that of full runs; costs are raised to
a power, which suppresses peaks.

The update is that of the authors' code: velocities are combined outputs, reused ones among them. It
computes u from latents. In an Euler run that is the mean of the velocities, weighted by the lengths
of their steps; the mean is used here, with every scheduler and prediction type. The code of the
search is not published. Edges cost here what the update would be off by on full runs. Spans up to 6
and edges up to 8 steps long are those of the published schedules. Of the exponents 1, 2 and 4 the
last came closest to the full run on calibration prompts of ``emoji-flux``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter, RunPrompts
from ertacache.baselines.clock import BaselineRun, Clock
from ertacache.baselines.uniform import ReplayRun
from ertacache.core.steppers import combine
from ertacache.integration.private_api import Pipeline
from ertacache.integration.schedulers import read_sigmas
from ertacache.integration.tracker import StepCall

__all__ = ["Edge", "MeanCache", "deviation_weights", "reuse_weights", "shortest_path"]

_SPANS = (1, 2, 3, 4, 5, 6)
_LONGEST = 8


@dataclass(frozen=True)
class Edge:
    """Two computed steps with reused ones between them.

    Attributes:
        start: the first computed step.
        stop: the next one.
        span: the steps K over which the JVP is taken.
        cost: what the average velocity is off by.
    """

    start: int
    stop: int
    span: int
    cost: float


@dataclass(frozen=True)
class MeanCache(Baseline):
    """MeanCache.

    Attributes:
        name: its row in the tables.
        edges: the best edge between any two steps; empty before calibration.
        exponent: of costs, to suppress peaks.
    """

    name: str = "MeanCache"
    edges: tuple[Edge, ...] = ()
    exponent: float = 4.0

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of computed steps."""
        low, high = -(-(num_inference_steps - 1) // _LONGEST) + 1, num_inference_steps
        return Parameter("computed steps", low, high, saves=False, integer=True, counts_steps=True)

    def calibrate(self, pipe: Pipeline, run_prompts: RunPrompts) -> MeanCache:
        """Measure the cost of every edge on full runs, as a mean over them."""
        found = list[Tensor]()
        with ExitStack() as undo:
            clock = Clock(pipe, lambda: _FullRun(pipe, found))
            undo.callback(clock.remove)
            run_prompts()
        if not found:
            raise ValueError("the calibration made no complete run")
        return replace(self, edges=_best_edges(torch.stack(found).mean(0)))

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Compute ``value`` steps, those of the shortest path."""
        if not self.edges:
            raise ValueError(f"{self.name} has no edges: calibrate it first")
        calibrated = self.edges[-1].stop + 1
        if calibrated != num_steps:
            raise ValueError(
                f"{self.name} was calibrated with runs of {calibrated} steps, not {num_steps}: "
                "calibrate it again"
            )
        path = shortest_path(self.edges, int(value), exponent=self.exponent)
        with ExitStack() as undo:
            clock = Clock(pipe, lambda: _AverageRun(pipe, path), num_steps=num_steps)
            undo.callback(clock.remove)
            return BaselineHandle(undo.pop_all(), lambda: clock.stats("network calls"))


def reuse_weights(sigmas: Sequence[float], step: int, span: int) -> list[float]:
    """The weights of the last velocities in that of a reused step: ``v - (s - t) JVP``.

    Args:
        sigmas: of the run; ``span + 2`` of them up to the end of the step are used.
        step: the reused step, from t to s.
        span: the velocities before it, oldest first; fewer at the start of a run.

    Example:
        >>> sigmas = [1.0, 0.75, 0.5, 0.25, 0.0]
        >>> reuse_weights(sigmas, 2, 1), reuse_weights(sigmas, 2, 2)
        ([1.0], [-0.25, 1.25])
    """
    first = max(0, step - span)
    length, passed = sigmas[step + 1] - sigmas[step], sigmas[step] - sigmas[first]
    share = length / passed
    weights = [share * (sigmas[k + 1] - sigmas[k]) / passed for k in range(first, step)]
    weights[0] -= share
    weights[-1] += 1.0
    return weights


def deviation_weights(sigmas: Sequence[float], start: int, stop: int, span: int) -> list[float]:
    """The weights of a full run's velocities in what an edge's average velocity is off by.

    Args:
        sigmas: of the run, T + 1 of them.
        start: the computed step; those up to ``stop`` are reused.
        stop: the next computed step.
        span: that of the reused steps.

    Example:
        >>> sigmas = [1.0, 0.75, 0.5, 0.25, 0.0]
        >>> deviation_weights(sigmas, 1, 3, 1)  # half of v_2 - v_1
        [0.0, -0.5, 0.5, 0.0]
        >>> deviation_weights(sigmas, 1, 3, 2)
        [0.125, -0.625, 0.5, 0.0]
    """
    velocities = torch.eye(len(sigmas) - 1, dtype=torch.float64)
    off = torch.zeros(len(sigmas) - 1, dtype=torch.float64)
    known = list(velocities[: start + 1])
    for step in range(start + 1, stop):
        weights = reuse_weights(sigmas, step, span)
        last = known[-len(weights) :]
        known.append(combine(last[0], last[1:], weights))
        length = sigmas[step + 1] - sigmas[step]
        off += length / (sigmas[stop] - sigmas[start]) * (velocities[step] - known[-1])
    found: list[float] = (off + 0.0).tolist()  # no negative zeros
    return found


def shortest_path(edges: Sequence[Edge], budget: int, *, exponent: float) -> tuple[Edge, ...]:
    """The path over ``budget`` steps, from the first to the last, of the least sum of powers.

    Args:
        edges: by ascending ``stop``.
        budget: the steps on the path.
        exponent: of the costs.

    Example:
        >>> edges = [Edge(0, 1, 1, 0.0), Edge(0, 2, 1, 3.0), Edge(1, 2, 1, 0.0)]
        >>> edges += [Edge(1, 3, 1, 1.0), Edge(2, 3, 1, 2.5)]
        >>> [edge.stop for edge in shortest_path(edges, 3, exponent=1.0)]
        [1, 3]
    """
    best: dict[tuple[int, int], tuple[float, tuple[Edge, ...]]] = {(0, 1): (0.0, ())}
    last = max((edge.stop for edge in edges), default=0)
    for edge in edges:
        for count in range(1, budget):
            if (edge.start, count) not in best:
                continue
            total, path = best[edge.start, count]
            total += edge.cost**exponent
            key = (edge.stop, count + 1)
            if key not in best or total < best[key][0]:
                best[key] = total, (*path, edge)
    if (last, budget) not in best:
        raise ValueError(f"no path computes {budget} of {last + 1} steps")
    return best[last, budget][1]


class _FullRun(BaselineRun):
    """A run that keeps all velocities, and at its end the costs of all edges."""

    def __init__(self, pipe: Pipeline, found: list[Tensor]) -> None:
        super().__init__()
        self._sigmas: list[float] = read_sigmas(pipe.scheduler).tolist()
        self._found = found
        self._velocities: list[Tensor] = []

    def advance(self, call: StepCall) -> Any:
        self._velocities.append(call.model_output.flatten().float().cpu())
        return super().advance(call)

    def end(self) -> None:
        self._found.append(_costs(torch.stack(self._velocities), self._sigmas))


def _costs(velocities: Tensor, sigmas: Sequence[float]) -> Tensor:
    """Mean distances by start, length and span, shape (T, longest, spans); inf beyond the end."""
    num_steps = len(velocities)
    costs = torch.full((num_steps, _LONGEST, len(_SPANS)), torch.inf, dtype=torch.float64)
    for start in range(num_steps):
        for stop in range(start + 1, min(start + _LONGEST, num_steps - 1) + 1):
            rows = [deviation_weights(sigmas, start, stop, span) for span in _SPANS]
            off = torch.tensor(rows) @ velocities
            costs[start, stop - start - 1] = off.abs().mean(1, dtype=torch.float64)
    return costs


def _best_edges(costs: Tensor) -> tuple[Edge, ...]:
    """The best span of every two steps, by ascending stop."""
    edges = [
        Edge(start, start + 1 + length, _SPANS[span], float(costs[start, length, span]))
        for start, lengths in enumerate(costs.argmin(2).tolist())
        for length, span in enumerate(lengths)
        if start + 1 + length < len(costs)
    ]
    return tuple(sorted(edges, key=lambda edge: edge.stop))


class _AverageRun(ReplayRun):
    """A run on a path; the scheduler gets the average velocity on reused steps."""

    def __init__(self, pipe: Pipeline, path: Sequence[Edge]) -> None:
        super().__init__(frozenset([0, *(edge.stop for edge in path)]))
        sigmas: list[float] = read_sigmas(pipe.scheduler).tolist()
        self._weights = {
            step: reuse_weights(sigmas, step, edge.span)
            for edge in path
            for step in range(edge.start + 1, edge.stop)
        }
        self._velocities = deque[Tensor](maxlen=_SPANS[-1])

    def advance(self, call: StepCall) -> Any:
        weights, velocity = self._weights.get(self.step), call.model_output
        if weights is not None:
            first, *others = list(self._velocities)[-len(weights) :]
            velocity = combine(first.float(), others, weights).to(velocity.dtype)
        self._velocities.append(velocity)
        return call.original_step(velocity)

    def cached(self) -> Iterable[Any]:
        return [*super().cached(), self._velocities]
