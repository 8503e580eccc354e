"""TeaCache (Liu et al. 2024): reuse the block stack while its input has not changed much.

The relative L1 change of the modulated input, mapped to a change of the output by a polynomial, is
added up; below the threshold the cached residual of all blocks is added. Polynomials are published
for a few checkpoints and refitted on calibration runs for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.baselines.blocks import BlockCall, BlockStack, Decision
from ertacache.baselines.clock import Clock, first_tensor
from ertacache.baselines.compat import find_blocks, one_network, why_no_blocks
from ertacache.baselines.interface import Handle, Knob, Runs, require
from ertacache.core.residual import relative_l1
from ertacache.integration.compat import Pipeline

__all__ = ["PUBLISHED", "TeaCache", "TeaCacheRule", "evaluate", "fit_polynomial"]

PUBLISHED: dict[str, tuple[float, ...]] = {
    "FLUX.1": (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861),
    "Wan2.1-T2V-1.3B": (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
    "CogVideoX-2b": (-31.0658903, 25.4732368, -5.92380459, 1.75769064, -0.00361568434),
    "OpenSora-STDiT-v3": (217.546007, -118.329252, 26.8662585, -0.0459364272, 0.048442624),
    "CogVideoX-5b": (-1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339),
}
"""Polynomials of published checkpoints by a part of their name, highest degree first."""


@dataclass(frozen=True)
class TeaCache:
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
        if reason is None and _kind(pipe) not in _SIGNALS:
            return f"TeaCache has no rule for the modulated input of {_kind(pipe)}"
        return reason

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The threshold of the accumulated change."""
        return Knob("threshold", 1e-4, 100.0, saves=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> TeaCache:
        """Take the published polynomial of the checkpoint, or fit one on untouched runs."""
        known = _published(pipe)
        return replace(self, polynomial=known or _refit(pipe, runs))

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Reuse the block stack under the threshold ``knob``."""
        require(self.applies(pipe))
        polynomial = self.polynomial or _published(pipe)
        if not polynomial:
            raise ValueError("TeaCache has no polynomial for this checkpoint: calibrate it first")
        self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        network = one_network(pipe)
        with ExitStack() as undo:
            signal = Signal(network, undo)
            clock = Clock(pipe, num_steps=num_inference_steps)
            undo.callback(clock.remove)
            rule = TeaCacheRule(polynomial, knob, num_inference_steps, len(find_blocks(network)))
            clock.at_start(rule.reset)
            stack = BlockStack(network, clock, lambda call: rule.decide(call, signal(call)))
            undo.callback(stack.remove)
            kept = undo.pop_all()
        return Handle(kept, lambda: stack.stats)


class TeaCacheRule:
    """When the accumulated, rescaled change of the input is below the threshold, reuse."""

    def __init__(
        self, polynomial: Sequence[float], threshold: float, num_steps: int, num_blocks: int
    ) -> None:
        """Start with nothing accumulated."""
        self._polynomial, self._threshold = tuple(polynomial), threshold
        self._last, self._all = num_steps - 1, (range(num_blocks),)
        self._before: dict[int, Tensor] = {}
        self._change: dict[int, float] = {}

    def reset(self) -> None:
        """Forget the run before."""
        self._before, self._change = {}, {}

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
    """The modulated input that TeaCache watches, by the kind of block."""

    def __init__(self, network: nn.Module, undo: ExitStack) -> None:
        """Listen to the time embedding where no block is given it."""
        kind = type(find_blocks(network)[0].module).__name__
        self._read = _SIGNALS[kind]
        self._time: list[Tensor] = []
        embedder = getattr(network, "condition_embedder", None)
        if kind == "WanTransformerBlock" and isinstance(embedder, nn.Module):
            listener = embedder.register_forward_hook(self._listen)
            undo.callback(listener.remove)

    def _listen(self, module: nn.Module, args: Any, output: Any) -> None:
        self._time = [output[0]]

    def __call__(self, call: BlockCall) -> Tensor:
        """Return the modulated input of a call."""
        return self._read(call, self._time)


_SIGNALS: dict[str, Callable[[BlockCall, list[Tensor]], Tensor]] = {
    "FluxTransformerBlock": lambda call, time: _flux(call),
    "WanTransformerBlock": lambda call, time: time[0],
    "CogVideoXBlock": lambda call, time: call.arguments["temb"],
    "OpenSoraBlock": lambda call, time: _opensora(call),
}


def _flux(call: BlockCall) -> Tensor:
    norm: Any = call.block.norm1
    modulated: Tensor = norm(call.arguments["hidden_states"], emb=call.arguments["temb"])[0]
    return modulated


def _opensora(call: BlockCall) -> Tensor:
    block: Any = call.block
    given = (call.arguments[name] for name in ("hidden_states", "modulation"))
    modulated: Tensor = block.modulated_input(*given)
    return modulated


def _kind(pipe: Pipeline) -> str:
    return type(find_blocks(one_network(pipe))[0].module).__name__


def _published(pipe: Pipeline) -> tuple[float, ...] | None:
    config: Any = getattr(one_network(pipe), "config", {})
    name = str(dict(config).get("_name_or_path", "")).lower()
    return next((p for part, p in PUBLISHED.items() if part.lower() in name), None)


def _refit(pipe: Pipeline, runs: Runs) -> tuple[float, ...]:
    """Fit the change of the output on the change of the input over untouched runs."""
    profile = _Changes()
    network = one_network(pipe)
    with ExitStack() as undo:
        signal = Signal(network, undo)
        clock = Clock(pipe, around=lambda compute: profile.output(clock, compute()))
        undo.callback(clock.remove)
        clock.at_start(profile.reset)
        stack = BlockStack(network, clock, lambda call: profile.input(call, signal(call)))
        undo.callback(stack.remove)
        runs()
    return fit_polynomial(profile.x, profile.y)


class _Changes:
    """Relative L1 changes from step to step, of the modulated input and of the output."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def reset(self) -> None:
        self._inputs, self._outputs = {}, {}

    def input(self, call: BlockCall, signal: Tensor) -> Decision:
        _append_change(self.x, self._inputs, call.branch, signal)
        return Decision()

    def output(self, clock: Clock, output: Any) -> Any:
        _append_change(self.y, self._outputs, clock.branch, first_tensor(output))
        return output


def _append_change(changes: list[float], before: dict[int, Tensor], branch: int, x: Tensor) -> None:
    if branch in before:
        changes.append(relative_l1(x, before[branch], reference=before[branch]))
    before[branch] = x
