"""T-GATE (Liu et al. 2024): once the prompt has done its work, stop asking for it.

Before the gate self-attention is reused but for every fifth step after the warm-up. At the gate
cross-attention is cached as the mean of both guidance branches; behind it cross-attention comes
from the cache and guidance is dropped, so that one branch is computed: one call of two, or one half
of the batch. Needs a cross-attention of its own in every block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.baselines.clock import Clock, Compute
from ertacache.baselines.compat import find_blocks, one_network, why_no_blocks
from ertacache.baselines.interface import Handle, Knob, NotApplicableError, Runs, Stats, require
from ertacache.integration.compat import HookSeat, ModelHook, Pipeline

__all__ = ["TGate"]

_NAMES = (("attn1", "attn2"), ("attn", "cross_attn"))  # self- and cross-attention of a block
_TEXT_FIRST = ("OpenSoraTransformer3DModel",)  # the first half of a batch; elsewhere the second


@dataclass(frozen=True)
class TGate:
    """T-GATE with its published intervals.

    Attributes:
        name: its row in the tables.
        warm_up: first steps, computed in full.
        sp_interval: before the gate self-attention is computed every so many steps.
        fi_interval: the same behind the gate.
    """

    name: str = "T-GATE"
    warm_up: int = 2
    sp_interval: int = 5
    fi_interval: int = 1

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs cross-attention apart from self-attention in every block."""
        reason = why_no_blocks(pipe)
        if reason is not None:
            return reason
        network = one_network(pipe)
        for block in find_blocks(network):
            if _attention(block.module) is None:
                kind = type(block.module).__name__
                return f"T-GATE caches cross-attention, but {kind} attends to the text jointly"
        return None

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The first step behind the gate."""
        return Knob("gate step", 1, num_inference_steps, saves=False, integer=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> TGate:
        """There is nothing to learn."""
        return self

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Put the gate before step ``knob``."""
        require(self.applies(pipe))
        gate = int(self.knob(pipe, num_inference_steps=num_inference_steps).check(knob))
        run = _GatedRun(self, pipe, gate)
        with ExitStack() as undo:
            clock = Clock(pipe, num_steps=num_inference_steps, around=run.call)
            undo.callback(clock.remove)
            run.follow(clock)
            for block in find_blocks(one_network(pipe)):
                layers = _attention(block.module)
                assert layers is not None
                for layer, cross in zip(layers, (False, True), strict=True):
                    seat = HookSeat(layer, _AttentionHook(run, cross=cross))
                    undo.callback(seat.remove)
            undo.callback(run.reset)
            kept = undo.pop_all()
        return Handle(
            kept,
            lambda: Stats("attention layers", run.computed, run.reused, clock.cached_bytes),
        )

    def computes_self_attention(self, step: int, *, gate: int) -> bool:
        """Tell whether self-attention is computed on a step.

        Example:
            >>> [k for k in range(12) if TGate().computes_self_attention(k, gate=10)]
            [0, 1, 2, 7, 10, 11]
        """
        if step < gate:
            return step < self.warm_up or (step - self.warm_up) % self.sp_interval == 0
        return (step - gate) % self.fi_interval == 0


class _GatedRun:
    """The caches of a run, and what is counted."""

    def __init__(self, method: TGate, pipe: Pipeline, gate: int) -> None:
        self.computed = self.reused = 0
        self._method, self._pipe, self._gate = method, pipe, gate
        self._clock: Clock | None = None
        self._self: dict[tuple[nn.Module, int], Any] = {}
        self._cross: dict[nn.Module, list[Tensor]] = {}
        self._conditional: Any = None

    def follow(self, clock: Clock) -> None:
        self._clock = clock
        clock.at_start(self.reset)
        clock.weigh(lambda: [*self._self.values(), *self._cross.values()])

    def reset(self) -> None:
        self._self, self._cross, self._conditional = {}, {}, None

    @property
    def _step(self) -> int:
        assert self._clock is not None
        return self._clock.step or 0

    @property
    def _branch(self) -> int:
        assert self._clock is not None
        return self._clock.branch

    def call(self, compute: Compute) -> Any:
        """Stand around the network: behind the gate the second branch repeats the first."""
        if self._step < self._gate:
            return compute()
        if self._branch > 0:
            self.reused += 2 * len(find_blocks(one_network(self._pipe)))
        elif self._batched:
            self._conditional = _twice(compute(self._text_half(compute.batch)))
        else:
            self._conditional = compute()
        return self._conditional

    @property
    def _batched(self) -> bool:
        """Whether both branches are rows of one call: there is guidance, and one call per step."""
        guided = bool(getattr(self._pipe, "do_classifier_free_guidance", False))
        return guided and all(len(kept) == 1 for kept in self._cross.values())

    def _text_half(self, batch: int) -> slice:
        first = type(one_network(self._pipe)).__name__ in _TEXT_FIRST
        return slice(0, batch // 2) if first else slice(batch // 2, batch)

    def attend(self, layer: nn.Module, cross: bool, compute: Callable[[], Any]) -> Any:
        """Stand in for an attention layer."""
        if self._clock is None or self._clock.step is None:
            return compute()
        if cross:
            return self._attend_cross(layer, compute)
        key = (layer, self._branch)
        if key in self._self and not self._method.computes_self_attention(
            self._step, gate=self._gate
        ):
            self.reused += 1
            return self._self[key]
        self.computed += 1
        self._self[key] = compute()
        return self._self[key]

    def _attend_cross(self, layer: nn.Module, compute: Callable[[], Any]) -> Any:
        if self._step >= self._gate:
            self.reused += 1
            kept = self._cross[layer]
            branches = kept[0].chunk(2) if self._batched else kept
            return sum(branches[1:], branches[0]) / len(branches)
        self.computed += 1
        output = compute()
        if self._step == self._gate - 1:
            self._cross.setdefault(layer, []).append(output)
        return output


class _AttentionHook(ModelHook):
    def __init__(self, run: _GatedRun, *, cross: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._cross = run, cross

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        return self._run.attend(module, self._cross, lambda: forward(*args, **kwargs))


def _attention(block: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The self- and the cross-attention of a block, None if it has not both."""
    for names in _NAMES:
        own, cross = (getattr(block, name, None) for name in names)
        if own is not None and cross is not None and getattr(cross, "is_cross_attention", False):
            return own, cross
    return None


def _twice(output: Any) -> Any:
    """The output of one half of a batch, for both."""
    if isinstance(output, Tensor):
        return torch.cat([output, output])
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return (_twice(output[0]), *output[1:])
    raise NotApplicableError("T-GATE cannot repeat what the network returned for half of its batch")
