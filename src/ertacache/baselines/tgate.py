"""T-GATE (Liu et al. 2024): cache cross-attention and drop guidance after a gate step.

Before the gate self-attention is reused but for every fifth step after the warm-up. At the gate
cross-attention is cached as the mean of both guidance branches; behind it cross-attention comes
from the cache and guidance is dropped, so that one branch is computed: one call of two, or one half
of the batch. Needs a separate cross-attention in every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.baselines.architectures import find_architecture
from ertacache.baselines.base import Baseline, BaselineHandle, NotApplicableError, Parameter
from ertacache.baselines.clock import BaselineRun, Clock
from ertacache.baselines.private_api import find_blocks, one_network, why_no_blocks
from ertacache.integration.private_api import HookRegistration, ModelHook, Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["TGate"]

_NAMES = (("attn1", "attn2"), ("attn", "cross_attn"))  # self- and cross-attention of a block


@dataclass(frozen=True)
class TGate(Baseline):
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

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The first step behind the gate."""
        return Parameter("gate step", 1, num_inference_steps, saves=False, integer=True)

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Put the gate before step ``value``."""
        with ExitStack() as undo:
            clock = Clock(pipe, lambda: _GatedRun(self, pipe, int(value)), num_steps=num_steps)
            undo.callback(clock.remove)
            for block in find_blocks(one_network(pipe)):
                layers = _attention(block.module)
                assert layers is not None  # it applies
                for layer, cross in zip(layers, (False, True), strict=True):
                    hook = HookRegistration(layer, _AttentionHook(clock, cross=cross))
                    undo.callback(hook.remove)
            return BaselineHandle(undo.pop_all(), lambda: clock.stats("attention layers"))

    def computes_self_attention(self, step: int, *, gate: int) -> bool:
        """Return whether self-attention is computed on a step.

        Example:
            >>> [k for k in range(12) if TGate().computes_self_attention(k, gate=10)]
            [0, 1, 2, 7, 10, 11]
        """
        if step < gate:
            return step < self.warm_up or (step - self.warm_up) % self.sp_interval == 0
        return (step - gate) % self.fi_interval == 0


class _GatedRun(BaselineRun):
    """The caches of a run."""

    def __init__(self, method: TGate, pipe: Pipeline, gate: int) -> None:
        super().__init__()
        self._method, self._pipe, self._gate = method, pipe, gate
        self._self: dict[tuple[nn.Module, int], Any] = {}
        self._cross: dict[nn.Module, list[Tensor]] = {}
        self._conditional: Any = None

    def cached(self) -> Iterable[Any]:
        return [*self._self.values(), *self._cross.values()]

    def call(self, call: NetworkCall) -> Any:
        """Behind the gate the second branch repeats the first."""
        if self.step < self._gate:
            return call.compute()
        if self.branch > 0:
            self.reused += 2 * len(find_blocks(one_network(self._pipe)))
        elif self._batched:
            self._conditional = _twice(call.compute(self._text_half(call.batch)))
        else:
            self._conditional = call.compute()
        return self._conditional

    @property
    def _batched(self) -> bool:
        """Whether both branches are rows of one call: there is guidance, and one call per step."""
        guided = bool(getattr(self._pipe, "do_classifier_free_guidance", False))
        return guided and all(len(kept) == 1 for kept in self._cross.values())

    def _text_half(self, batch: int) -> slice:
        architecture = find_architecture(one_network(self._pipe))
        first = architecture is not None and architecture.text_first
        return slice(0, batch // 2) if first else slice(batch // 2, batch)

    def attend_self(self, layer: nn.Module, compute: Callable[[], Any]) -> Any:
        """Return the output of a self-attention layer."""
        key = (layer, self.branch)
        if key in self._self and not self._method.computes_self_attention(
            self.step, gate=self._gate
        ):
            self.reused += 1
            return self._self[key]
        self.computed += 1
        self._self[key] = compute()
        return self._self[key]

    def attend_cross(self, layer: nn.Module, compute: Callable[[], Any]) -> Any:
        """Return the output of a cross-attention layer."""
        if self.step >= self._gate:
            self.reused += 1
            kept = self._cross[layer]
            branches = kept[0].chunk(2) if self._batched else kept
            return sum(branches[1:], branches[0]) / len(branches)
        self.computed += 1
        output = compute()
        if self.step == self._gate - 1:
            self._cross.setdefault(layer, []).append(output)
        return output


class _AttentionHook(ModelHook):
    def __init__(self, clock: Clock[_GatedRun], *, cross: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock, self._cross = clock, cross

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        run = self._clock.run
        if run is None:
            return forward(*args, **kwargs)
        attend = run.attend_cross if self._cross else run.attend_self
        return attend(module, lambda: forward(*args, **kwargs))


def _attention(block: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The self- and the cross-attention of a block, None if it does not have both."""
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
