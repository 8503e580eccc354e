"""The block-stack machine: skip contiguous ranges of transformer blocks, add a cached delta.

Blocks are found through diffusers' metadata and wrapped one by one on the instance; no forward is
copied. A rule is asked once per call of the network, at the first block, which ranges to reuse and
which to record. Deltas are kept per range and per guidance branch. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ertacache.baselines.clock import Clock
from ertacache.baselines.compat import Block, Streams, find_blocks
from ertacache.baselines.interface import Stats
from ertacache.integration.compat import HookSeat, ModelHook

__all__ = ["BlockCall", "BlockStack", "Decision", "Rule"]


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


class BlockStack:
    """The blocks of a network under a rule, until ``remove``."""

    def __init__(self, network: nn.Module, clock: Clock, rule: Rule) -> None:
        """Wrap every block.

        Args:
            network: a network whose blocks diffusers knows.
            clock: tells step and branch; outside a run everything is computed.
            rule: asked at the first block of every call.
        """
        self._blocks = find_blocks(network)
        self._clock, self._rule = clock, rule
        self._decision = Decision()
        self._deltas: dict[tuple[int, range], Streams] = {}
        self._entered: dict[range, Streams] = {}
        self._computed = self._reused = 0
        clock.at_start(self.forget)
        clock.weigh(lambda: self._deltas.values())
        with ExitStack() as undo:
            for index, block in enumerate(self._blocks):
                seat = HookSeat(block.module, _BlockHook(self, index))
                undo.callback(seat.remove)
            undo.callback(self.forget)
            self._undo = undo.pop_all()

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    @property
    def stats(self) -> Stats:
        """Blocks run and skipped so far."""
        return Stats("blocks", self._computed, self._reused, self._clock.cached_bytes)

    def delta(self, branch: int, blocks: range) -> Tensor:
        """Return what a range of blocks last added to the hidden states of a branch."""
        return self._deltas[branch, blocks][0]

    def forget(self) -> None:
        """Drop all deltas."""
        self._deltas, self._entered, self._decision = {}, {}, Decision()

    def remove(self) -> None:
        """Leave the blocks as they were."""
        self._undo.close()

    def run(
        self, index: int, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Stand in for the forward of block ``index``."""
        if self._clock.step is None:
            return forward(*args, **kwargs)
        block = self._blocks[index]
        arguments = block.arguments(args, kwargs)
        if index == 0:
            self._decide(block, arguments)
        streams = block.inputs(arguments)
        for blocks in self._decision.reuse:
            if index in blocks:
                self._reused += 1
                return block.result(self._skip(index, blocks, streams))
        record = self._decision.record
        self._entered.update((blocks, streams) for blocks in record if index == blocks.start)
        output = forward(*args, **kwargs)
        self._computed += 1
        for blocks in record:
            if index == blocks.stop - 1:
                self._keep(blocks, block.outputs(output))
        return output

    def _decide(self, block: Block, arguments: Mapping[str, Any]) -> None:
        clock = self._clock
        assert clock.step is not None
        wish = self._rule(BlockCall(clock.step, clock.branch, block.module, arguments))
        known = tuple(r for r in wish.reuse if (clock.branch, r) in self._deltas)
        missing = tuple(r for r in wish.reuse if r not in known and r not in wish.record)
        self._decision = Decision(known, wish.record + missing)
        self._entered = {}

    def _skip(self, index: int, blocks: range, streams: Streams) -> Streams:
        if index != blocks.start:
            return streams
        return _add(streams, self._deltas[self._clock.branch, blocks])

    def _keep(self, blocks: range, after: Streams) -> None:
        before = self._entered.pop(blocks)
        if after[0].shape != before[0].shape:
            raise RuntimeError(
                f"blocks {blocks.start} to {blocks.stop - 1} turn hidden states of shape "
                f"{tuple(before[0].shape)} into {tuple(after[0].shape)}: no delta can be cached"
            )
        self._deltas[self._clock.branch, blocks] = _subtract(after, before)


class _BlockHook(ModelHook):
    def __init__(self, stack: BlockStack, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack, self._index = stack, index

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._stack.run(self._index, self.fn_ref.original_forward, args, kwargs)


def _add(streams: Streams, delta: Streams) -> Streams:
    encoder = None if streams[1] is None or delta[1] is None else streams[1] + delta[1]
    return streams[0] + delta[0], encoder


def _subtract(after: Streams, before: Streams) -> Streams:
    encoder = None if after[1] is None or before[1] is None else after[1] - before[1]
    return after[0] - before[0], encoder
