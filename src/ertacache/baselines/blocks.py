"""The block stack: skip contiguous ranges of transformer blocks and add a cached delta instead.

Blocks are found through diffusers' metadata and hooked one by one on the instance; no forward is
copied. Once per call of the network, at the first block, a rule decides which ranges to reuse and
which to record. Deltas are kept per range and per guidance branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ertacache.baselines.base import BaselineHandle
from ertacache.baselines.clock import BaselineRun, Clock
from ertacache.baselines.private_api import Block, Streams, find_blocks, one_network
from ertacache.integration.private_api import HookRegistration, ModelHook, Pipeline

__all__ = ["BlockCall", "BlockRun", "Decision", "Rule", "attach_blocks"]


@dataclass(frozen=True, eq=False)
class BlockCall:
    """What a rule sees: one call of the network, at its first block.

    Attributes:
        step: the step, from 0.
        branch: the call of the network within the step, from 0.
        block: the first block.
        arguments: what it was called with, by name.
    """

    step: int
    branch: int
    block: nn.Module
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """What is done with one call of the network.

    Attributes:
        reuse: ranges of blocks that are not run, disjoint; their recorded deltas are added. A range
            of which nothing was recorded yet is run and recorded.
        record: ranges whose deltas are kept; they may overlap.
    """

    reuse: tuple[range, ...] = ()
    record: tuple[range, ...] = ()


Rule = Callable[[BlockCall], Decision]


def _compute_all(call: BlockCall) -> Decision:
    return Decision()


class BlockRun(BaselineRun):
    """A run whose blocks are computed or replaced by their deltas, as a rule decides."""

    def __init__(self, rule: Rule = _compute_all) -> None:
        """Start without deltas; by default every block is computed."""
        super().__init__()
        self._rule = rule
        self._decision = Decision()
        self._deltas: dict[tuple[int, range], Streams] = {}
        self._entered: dict[range, Streams] = {}

    def decide(self, call: BlockCall) -> Decision:
        """Return what is done with a call of the network; called at its first block."""
        return self._rule(call)

    def cached(self) -> Iterable[Any]:
        """Return the deltas."""
        return self._deltas.values()

    def delta(self, blocks: range) -> Tensor:
        """Return what a range of blocks last added to the hidden states of the present branch."""
        return self._deltas[self.branch, blocks][0]

    def run_block(
        self, index: int, block: Block, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replace the forward of block ``index``: compute its output, or return that of a delta."""
        arguments = block.arguments(args, kwargs)
        if index == 0:
            self._enter(block, arguments)
        streams = block.inputs(arguments)
        for blocks in self._decision.reuse:
            if index in blocks:
                self.reused += 1
                return block.result(self._skip(index, blocks, streams))
        record = self._decision.record
        self._entered.update((blocks, streams) for blocks in record if index == blocks.start)
        output = forward(*args, **kwargs)
        self.computed += 1
        for blocks in record:
            if index == blocks.stop - 1:
                self._keep(blocks, block.outputs(output))
        return output

    def _enter(self, block: Block, arguments: Mapping[str, Any]) -> None:
        decided = self.decide(BlockCall(self.step, self.branch, block.module, arguments))
        known = tuple(r for r in decided.reuse if (self.branch, r) in self._deltas)
        missing = tuple(r for r in decided.reuse if r not in known and r not in decided.record)
        self._decision = Decision(known, decided.record + missing)
        self._entered = {}

    def _skip(self, index: int, blocks: range, streams: Streams) -> Streams:
        if index != blocks.start:
            return streams
        return _add(streams, self._deltas[self.branch, blocks])

    def _keep(self, blocks: range, after: Streams) -> None:
        before = self._entered.pop(blocks)
        if after[0].shape != before[0].shape:
            raise RuntimeError(
                f"blocks {blocks.start} to {blocks.stop - 1} turn hidden states of shape "
                f"{tuple(before[0].shape)} into {tuple(after[0].shape)}: no delta can be cached"
            )
        self._deltas[self.branch, blocks] = _subtract(after, before)


def attach_blocks(
    pipe: Pipeline, make_run: Callable[[], BlockRun], *, num_inference_steps: int | None = None
) -> BaselineHandle:
    """Hook every block of a pipeline's network, until the handle is detached.

    Args:
        pipe: a pipeline to whose network ``why_no_blocks`` has no objection.
        make_run: called when a run starts; outside of runs everything is computed.
        num_inference_steps: the steps every run has to have; None allows any number.
    """
    with ExitStack() as undo:
        clock = Clock(pipe, make_run, num_steps=num_inference_steps)
        undo.callback(clock.remove)
        for index, block in enumerate(find_blocks(one_network(pipe))):
            undo.callback(HookRegistration(block.module, _BlockHook(clock, index, block)).remove)
        return BaselineHandle(undo.pop_all(), lambda: clock.stats("blocks"))


class _BlockHook(ModelHook):
    def __init__(self, clock: Clock[BlockRun], index: int, block: Block) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock, self._index, self._block = clock, index, block

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        run = self._clock.run
        if run is None:
            return forward(*args, **kwargs)
        return run.run_block(self._index, self._block, forward, args, kwargs)


def _add(streams: Streams, delta: Streams) -> Streams:
    encoder = None if streams[1] is None or delta[1] is None else streams[1] + delta[1]
    return streams[0] + delta[0], encoder


def _subtract(after: Streams, before: Streams) -> Streams:
    encoder = None if after[1] is None or before[1] is None else after[1] - before[1]
    return after[0] - before[0], encoder
