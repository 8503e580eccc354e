"""Spectrum (Han et al., CVPR 2026): features forecast by Chebyshev polynomials of time.

On a reused step no block is run. The features that leave the last block are forecast from those of
all computed steps: a ridge fit of the Chebyshev polynomials T_0 to T_4, averaged with the straight
line through the last two. A warm-up is computed, then the distance of computed steps grows.

The numbers are those of the authors' commands: ridge 0.1, degree 4, equal weights, warm-up of 5,
first distance 2. Their text counts 4 polynomials, their code fits 5; the code is followed. It maps
50 steps to times from -1 to 1; here those of the run. The growth of the distance is what they vary
for speed (0.75, 3). With a first distance of 2 nearly half of a run is reused even without growth;
where more steps are to be computed it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter
from ertacache.baselines.blocks import BlockRun, attach_blocks
from ertacache.baselines.clock import BaselineRun, Clock, first_tensor, with_first_tensor
from ertacache.baselines.private_api import Block, find_blocks, one_network, why_no_blocks
from ertacache.core.steppers import combine
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["Spectrum", "choose_window", "computed_steps", "forecast_weights"]

Plan = Mapping[int, Sequence[float]]
"""The reused steps, each with the weights of the features of all steps computed before it."""

_WARM_UP = 5
_GROWTH = 0.005  # the unit in which the growth of the distance is searched


@dataclass(frozen=True)
class Spectrum(Baseline):
    """Spectrum, on the features of the last block or on the network's outputs.

    Attributes:
        name: its row in the tables.
        on_outputs: whether outputs of the network are forecast; published are features.
        ridge: of the fit.
        degree: of the polynomials.
        share: of the fit in the forecast; the rest is the straight line. 1 is the paper's method,
            a half what the authors recommend since.
    """

    name: str = "Spectrum"
    on_outputs: bool = False
    ridge: float = 0.1
    degree: int = 4
    share: float = 0.5

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks, unless it forecasts outputs."""
        return None if self.on_outputs else why_no_blocks(pipe)

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of computed steps; the growth of their distance follows."""
        high = num_inference_steps
        low = len(computed_steps(high, 2, high))
        return Parameter("computed steps", low, high, saves=False, integer=True, counts_steps=True)

    def plan(self, num_steps: int, budget: int) -> Plan:
        """Return the reused steps of a run with at most ``budget`` computed steps."""
        computed = computed_steps(num_steps, *choose_window(num_steps, budget))
        return {
            step: forecast_weights(
                [k for k in computed if k < step],
                step,
                num_steps=num_steps,
                degree=self.degree,
                ridge=self.ridge,
                share=self.share,
            )
            for step in sorted(set(range(num_steps)) - set(computed))
        }

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Forecast all but ``value`` steps."""
        plan = self.plan(num_steps, int(value))
        if not self.on_outputs:
            last = len(find_blocks(one_network(pipe))) - 1
            return attach_blocks(
                pipe, lambda: _FeatureRun(plan, last), num_inference_steps=num_steps
            )
        with ExitStack() as undo:
            clock = Clock(pipe, lambda: _OutputRun(plan), num_steps=num_steps)
            undo.callback(clock.remove)
            return BaselineHandle(undo.pop_all(), lambda: clock.stats("network calls"))


def computed_steps(num_steps: int, window: float, growth: float) -> tuple[int, ...]:
    """The warm-up, then steps whose distance is ``window``, which grows with each, rounded down.

    Example:
        >>> computed_steps(20, 2, 0.75)
        (0, 1, 2, 3, 4, 6, 8, 11, 15)
        >>> len(computed_steps(50, 2, 0.75)), len(computed_steps(50, 2, 3.0))  # as published
        (14, 10)
    """
    steps = list(range(min(_WARM_UP, num_steps)))
    while steps[-1] + math.floor(window) < num_steps:
        steps.append(steps[-1] + math.floor(window))
        window = round(window + growth, 3)  # as published, against sums such as 2.9999999
    return tuple(steps)


def choose_window(num_steps: int, budget: int) -> tuple[float, float]:
    """The first distance and the least growth that compute at most ``budget`` steps.

    Example:
        >>> choose_window(50, 14), choose_window(30, 15), choose_window(30, 20)
        ((2, 0.67), (2, 0.145), (1, 0.145))
    """
    window = 2 if len(computed_steps(num_steps, 2, 0.0)) >= budget else 1
    for unit in range(math.ceil(num_steps / _GROWTH) + 1):
        growth = round(unit * _GROWTH, 3)
        if len(computed_steps(num_steps, window, growth)) <= budget:
            return window, growth
    raise ValueError(f"no window computes at most {budget} of {num_steps} steps")


def forecast_weights(
    steps: Sequence[int],
    step: int,
    *,
    num_steps: int,
    degree: int = 4,
    ridge: float = 0.1,
    share: float = 0.5,
) -> list[float]:
    """The weights with which features of ``steps`` add up to the forecast for ``step``.

    Args:
        steps: the computed steps, ascending, at least two.
        step: the step to forecast.
        num_steps: steps of the run, whose times are from -1 to 1.
        degree: of the polynomials.
        ridge: of their fit.
        share: of the fit; the rest is the straight line through the last two steps.

    Example:
        >>> forecast_weights([0, 2], 3, num_steps=4, share=0.0)  # half a distance beyond
        [-0.5, 1.5]
        >>> weights = forecast_weights([0, 1, 2], 4, num_steps=4, degree=2, ridge=0.0, share=1.0)
        >>> [round(w, 9) for w in weights]  # the parabola through three values
        [3.0, -8.0, 6.0]
    """
    past, now = (_chebyshev(given, num_steps, degree) for given in (steps, [step]))
    normal = past.T @ past + ridge * torch.eye(degree + 1, dtype=torch.float64)
    weights: Tensor = share * (now @ torch.linalg.solve(normal, past.T))[0]
    line = (step - steps[-1]) / (steps[-1] - steps[-2])
    weights[-1] += (1 - share) * (1 + line)
    weights[-2] -= (1 - share) * line
    found: list[float] = weights.tolist()
    return found


def _chebyshev(steps: Sequence[int], num_steps: int, degree: int) -> Tensor:
    """T_0 to T_degree at the times of ``steps``, shape (steps, degree + 1)."""
    time = 2 * torch.tensor(steps, dtype=torch.float64) / num_steps - 1
    rows = [torch.ones_like(time), time]
    while len(rows) <= degree:
        rows.append(2 * time * rows[-1] - rows[-2])
    return torch.stack(rows[: degree + 1], dim=1)


class _Features:
    """The features of the computed steps of one run, by guidance branch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.kept: dict[int, list[Tensor]] = {}

    def keep(self, branch: int, features: Tensor) -> None:
        # They may be a view of image and text together.
        self.kept.setdefault(branch, []).append(features.clone())

    def can_forecast(self, step: int, branch: int) -> bool:
        """Whether a step is to be reused, and the branch was computed on all steps before it."""
        weights = self._plan.get(step)
        return weights is not None and len(weights) == len(self.kept.get(branch, ()))

    def forecast(self, step: int, branch: int) -> Tensor:
        first, *others = self.kept[branch]
        return combine(first.float(), others, self._plan[step]).to(first.dtype)


class _FeatureRun(BlockRun):
    """Runs all blocks or none; then the last one returns the forecast."""

    def __init__(self, plan: Plan, last: int) -> None:
        super().__init__()
        self._features, self._last = _Features(plan), last

    def run_block(
        self, index: int, block: Block, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._features.can_forecast(self.step, self.branch):
            self.reused += 1
            hidden, encoder = block.inputs(block.arguments(args, kwargs))
            if index == self._last:
                hidden = self._features.forecast(self.step, self.branch)
            return block.result((hidden, encoder))
        output = forward(*args, **kwargs)
        self.computed += 1
        if index == self._last:
            self._features.keep(self.branch, block.outputs(output)[0])
        return output

    def cached(self) -> Iterable[Any]:
        return self._features.kept.values()


class _OutputRun(BaselineRun):
    """Evaluates the network, or returns the forecast of its output."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._features = _Features(plan)
        self._last: Any = None  # for the form of an output

    def call(self, call: NetworkCall) -> Any:
        if self._features.can_forecast(self.step, self.branch):
            self.reused += 1
            forecast = self._features.forecast(self.step, self.branch)
            return with_first_tensor(self._last, forecast)
        self._last = call.compute()
        self.computed += 1
        self._features.keep(self.branch, first_tensor(self._last))
        return self._last

    def cached(self) -> Iterable[Any]:
        return self._features.kept.values()
