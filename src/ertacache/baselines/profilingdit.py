"""ProfilingDiT (Ma et al. 2025): reuse the blocks that write the background, then the others.

The first steps are computed in full, and so are refresh steps that get denser towards the end. In
between, the listed blocks are replaced by the deltas of the last refresh; the list of background
and of foreground blocks alternate from refresh to refresh. The published roles come from attention
maps; fused attention has none, so here a block's role is read off where it writes: the share of its
delta that falls on foreground tokens, profiled on full runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter, RunPrompts
from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, attach_blocks
from ertacache.baselines.private_api import Block, find_blocks, one_network, why_no_blocks
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["ProfilingDiT", "decide", "foreground_share", "join_blocks", "refresh_steps"]

_REFRESH, _OF = (6, 18, 26, 32, 38, 42, 46, 48), 50  # as published, of 50 steps


@dataclass(frozen=True)
class ProfilingDiT(Baseline):
    """ProfilingDiT.

    Attributes:
        name: its row in the tables.
        foreground: blocks from the most to the least concerned with the foreground; empty before
            calibration.
    """

    name: str = "ProfilingDiT"
    foreground: tuple[int, ...] = ()

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks."""
        return why_no_blocks(pipe)

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of blocks on either list."""
        high = len(find_blocks(one_network(pipe)))
        return Parameter("reused blocks", 0, high, saves=True, integer=True)

    def calibrate(self, pipe: Pipeline, run_prompts: RunPrompts) -> ProfilingDiT:
        """Rank the blocks by how much of what they write is foreground."""
        shares = _profile_roles(pipe, run_prompts)
        order = sorted(range(len(shares)), key=lambda k: (-shares[k], k))
        return replace(self, foreground=tuple(order))

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Reuse ``value`` blocks between the refresh steps."""
        if not self.foreground:
            raise ValueError("ProfilingDiT does not know the blocks' roles: calibrate it first")
        count = int(value)
        lists = (
            join_blocks(self.foreground[len(self.foreground) - count :]),
            join_blocks(self.foreground[:count]),
        )
        refresh = refresh_steps(num_steps)
        return attach_blocks(
            pipe,
            lambda: BlockRun(lambda call: decide(call, refresh=refresh, lists=lists)),
            num_inference_steps=num_steps,
        )


def refresh_steps(num_steps: int) -> tuple[int, ...]:
    """The published refresh steps of 50, carried over to another number of steps.

    Example:
        >>> refresh_steps(50)
        (6, 18, 26, 32, 38, 42, 46, 48)
        >>> refresh_steps(8)
        (1, 3, 4, 5, 6, 7)
    """
    return tuple(sorted({int(k * num_steps / _OF + 0.5) for k in _REFRESH} & {*range(num_steps)}))


def join_blocks(blocks: Iterable[int]) -> tuple[range, ...]:
    """Runs of neighbouring blocks, each of which is cached as one delta.

    Example:
        >>> join_blocks([4, 0, 5, 7, 6])
        (range(0, 1), range(4, 8))
    """
    runs: list[range] = []
    for k in sorted(blocks):
        if runs and runs[-1].stop == k:
            runs[-1] = range(runs[-1].start, k + 1)
        else:
            runs.append(range(k, k + 1))
    return tuple(runs)


def decide(
    call: BlockCall, *, refresh: Sequence[int], lists: Sequence[tuple[range, ...]]
) -> Decision:
    """Full before the first refresh and on every refresh; else one list after the other."""
    passed = sum(step <= call.step for step in refresh)
    if passed == 0:
        return Decision()
    blocks = lists[(passed - 1) % len(lists)]
    return Decision(record=blocks) if call.step in refresh else Decision(reuse=blocks)


def foreground_share(deltas: Sequence[Tensor], result: Tensor) -> list[float]:
    """The share of what each block adds that falls on foreground tokens.

    Foreground are the tokens that leave the stack farther from the mean token than the average.

    Args:
        deltas: what each block added, shape (B, N, C).
        result: the hidden states behind the last block, shape (B, N, C).

    Example:
        >>> result = torch.tensor([[[0.0], [0.0], [0.0], [9.0]]])  # one token stands out
        >>> front, back = torch.tensor([0.0, 0, 0, 1]), torch.tensor([1.0, 1, 0, 0])
        >>> foreground_share([front.view(1, 4, 1), back.view(1, 4, 1)], result)
        [1.0, 0.0]
    """
    distance = (result - result.mean(1, keepdim=True)).norm(dim=-1)
    front = distance > distance.mean(1, keepdim=True)
    shares = []
    for delta in deltas:
        energy = delta.double().square().sum(-1)
        total = energy.sum()
        shares.append((energy[front].sum() / total).item() if bool(total > 0) else 0.0)
    return shares


def _profile_roles(pipe: Pipeline, run_prompts: RunPrompts) -> list[float]:
    """The foreground share of every block, averaged over all calls of the network."""
    blocks = find_blocks(one_network(pipe))
    found: list[list[float]] = []
    with attach_blocks(pipe, lambda: _ProfileRun(blocks, found)):
        run_prompts()
    if not found:
        raise ValueError("the calibration made no run")
    shares: list[float] = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    return shares


class _ProfileRun(BlockRun):
    """A run that appends the foreground share of every block, call by call."""

    def __init__(self, blocks: Sequence[Block], found: list[list[float]]) -> None:
        super().__init__()
        self._first, self._found = blocks[0], found
        self._single = tuple(range(k, k + 1) for k in range(len(blocks)))

    def decide(self, call: BlockCall) -> Decision:
        self._entering = self._first.inputs(call.arguments)[0]
        return Decision(record=self._single)

    def call(self, call: NetworkCall) -> Any:
        output = call.compute()
        deltas = [self.delta(block) for block in self._single]
        self._found.append(foreground_share(deltas, sum(deltas, self._entering)))
        return output
