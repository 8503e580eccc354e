"""TeaCache (Liu et al. 2024): reuse the block stack while its input has not changed much.

The relative L1 change of the modulated input, mapped to a change of the output by a polynomial, is
added up; below the threshold the cached residual of all blocks is added. Polynomials are published
for a few checkpoints and refitted on calibration runs for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.baselines.architectures import find_architecture_of_block
from ertacache.baselines.base import Baseline, BaselineHandle, Parameter, RunPrompts
from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, attach_blocks
from ertacache.baselines.clock import first_tensor
from ertacache.baselines.private_api import find_blocks, one_network, why_no_blocks
from ertacache.core.paper import relative_l1
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["PUBLISHED", "Signal", "TeaCache", "TeaCacheRule", "evaluate", "fit_polynomial"]

PUBLISHED: dict[str, tuple[float, ...]] = {
    "FLUX.1": (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861),
    "Wan2.1-T2V-1.3B": (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
    "CogVideoX-2b": (-31.0658903, 25.4732368, -5.92380459, 1.75769064, -0.00361568434),
    "OpenSora-STDiT-v3": (217.546007, -118.329252, 26.8662585, -0.0459364272, 0.048442624),
    "CogVideoX-5b": (-1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339),
}
"""Polynomials of published checkpoints by a part of their name, highest degree first."""


@dataclass(frozen=True)
class TeaCache(Baseline):
    """TeaCache.

    Attributes:
        name: its row in the tables.
        polynomial: coefficients, highest degree first; empty before calibration.
    """

    name: str = "TeaCache"
    polynomial: tuple[float, ...] = ()

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks, and to know what the modulated input of the first is."""
        reason = why_no_blocks(pipe)
        if reason is None:
            block = find_blocks(one_network(pipe))[0].module
            architecture = find_architecture_of_block(block)
            if architecture is None or architecture.modulated_input is None:
                kind = type(block).__name__
                return f"TeaCache has no rule for the modulated input of {kind}"
        return reason

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The threshold of the accumulated change."""
        return Parameter("threshold", 1e-4, 100.0, saves=True)

    def calibrate(self, pipe: Pipeline, run_prompts: RunPrompts) -> TeaCache:
        """Take the published polynomial of the checkpoint, or fit one on full runs."""
        known = _published(pipe)
        return replace(self, polynomial=known or _refit(pipe, run_prompts))

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Reuse the block stack under the threshold ``value``."""
        polynomial = self.polynomial or _published(pipe)
        if not polynomial:
            raise ValueError("TeaCache has no polynomial for this checkpoint: calibrate it first")
        network = one_network(pipe)
        num_blocks = len(find_blocks(network))

        def make_run() -> BlockRun:
            rule = TeaCacheRule(polynomial, value, num_steps, num_blocks)
            return BlockRun(lambda call: rule.decide(call, signal(call)))

        with ExitStack() as undo:
            signal = Signal(network, undo)
            handle = attach_blocks(pipe, make_run, num_inference_steps=num_steps)
            undo.callback(handle.detach)
            return BaselineHandle(undo.pop_all(), lambda: handle.stats)


class TeaCacheRule:
    """Reuses while the accumulated, rescaled change of the input is below the threshold."""

    def __init__(
        self, polynomial: Sequence[float], threshold: float, num_steps: int, num_blocks: int
    ) -> None:
        """Start with nothing accumulated."""
        self._polynomial, self._threshold = tuple(polynomial), threshold
        self._last, self._all = num_steps - 1, (range(num_blocks),)
        self._before: dict[int, Tensor] = {}
        self._change: dict[int, float] = {}

    def decide(self, call: BlockCall, signal: Tensor) -> Decision:
        """Decide one call from its modulated input; branches are kept apart."""
        before = self._before.get(call.branch)
        self._before[call.branch] = signal
        if before is not None and call.step not in (0, self._last):
            change = relative_l1(signal, before, reference=before)
            change = self._change[call.branch] + evaluate(self._polynomial, change)
            if change < self._threshold:
                self._change[call.branch] = change
                return Decision(reuse=self._all)
        self._change[call.branch] = 0.0
        return Decision(record=self._all)


def evaluate(polynomial: Sequence[float], x: float) -> float:
    """The value of a polynomial, highest degree first.

    Example:
        >>> evaluate([2.0, 0.0, 1.0], 3.0)
        19.0
    """
    value = 0.0
    for coefficient in polynomial:
        value = value * x + coefficient
    return value


def fit_polynomial(x: Sequence[float], y: Sequence[float], degree: int = 4) -> tuple[float, ...]:
    """The least-squares polynomial of a degree, highest degree first; the smallest one if several.

    Example:
        >>> [round(c, 6) + 0.0 for c in fit_polynomial([0, 1, 2, 3, 4, 5], [1, 2, 5, 10, 17, 26])]
        [0.0, 0.0, 1.0, 0.0, 1.0]
    """
    if not x:
        raise ValueError("a polynomial needs at least one point")
    points = torch.tensor(x, dtype=torch.float64)
    powers = torch.stack([points**d for d in range(degree, -1, -1)], dim=1)
    scale = powers.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    target = torch.tensor(y, dtype=torch.float64)[:, None]
    solution = torch.linalg.lstsq(powers / scale, target, driver="gelsd").solution[:, 0]
    return tuple((solution / scale).tolist())


class Signal:
    """The modulated input that TeaCache compares from step to step."""

    def __init__(self, network: nn.Module, undo: ExitStack) -> None:
        """Hook the time embedder of an architecture whose blocks are not given its output."""
        architecture = find_architecture_of_block(find_blocks(network)[0].module)
        assert architecture is not None  # TeaCache applies
        assert architecture.modulated_input is not None
        self._read = architecture.modulated_input
        self._time: Tensor | None = None
        if architecture.time_embedder is not None:
            embedder = network.get_submodule(architecture.time_embedder)
            undo.callback(embedder.register_forward_hook(self._keep_time).remove)

    def _keep_time(self, module: nn.Module, args: Any, output: Any) -> None:
        self._time = output[0]

    def __call__(self, call: BlockCall) -> Tensor:
        """Return the modulated input of a call."""
        return self._read(call, self._time)


def _published(pipe: Pipeline) -> tuple[float, ...] | None:
    config: Any = getattr(one_network(pipe), "config", {})
    name = str(dict(config).get("_name_or_path", "")).lower()
    return next((p for part, p in PUBLISHED.items() if part.lower() in name), None)


def _refit(pipe: Pipeline, run_prompts: RunPrompts) -> tuple[float, ...]:
    """Fit the change of the output on the change of the input over full runs."""
    x, y = list[float](), list[float]()
    with ExitStack() as undo:
        signal = Signal(one_network(pipe), undo)
        undo.enter_context(attach_blocks(pipe, lambda: _ChangeRun(signal, x, y)))
        run_prompts()
    return fit_polynomial(x, y)


class _ChangeRun(BlockRun):
    """Appends relative L1 changes from step to step, of the modulated input and of the output."""

    def __init__(self, signal: Signal, x: list[float], y: list[float]) -> None:
        super().__init__()
        self._signal, self._x, self._y = signal, x, y
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def decide(self, call: BlockCall) -> Decision:
        _append_change(self._x, self._inputs, call.branch, self._signal(call))
        return Decision()

    def call(self, call: NetworkCall) -> Any:
        output = call.compute()
        _append_change(self._y, self._outputs, self.branch, first_tensor(output))
        return output


def _append_change(changes: list[float], before: dict[int, Tensor], branch: int, x: Tensor) -> None:
    if branch in before:
        changes.append(relative_l1(x, before[branch], reference=before[branch]))
    before[branch] = x
