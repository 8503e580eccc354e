"""Delta-DiT (Chen et al. 2024): cache what a contiguous range of blocks adds.

Every N-th step is computed in full. On the steps between, N_c blocks are replaced by the delta they
added last: the rear ones in the first half of a run, which makes the outline, the front ones in the
second half, which makes the details.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter
from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, attach_blocks
from ertacache.baselines.private_api import find_blocks, one_network, why_no_blocks
from ertacache.integration.private_api import Pipeline

__all__ = ["DeltaDiT", "DeltaSetting", "choose_setting", "decide"]


@dataclass(frozen=True)
class DeltaSetting:
    """How a run is cached.

    Attributes:
        interval: N, every N-th step is computed in full.
        num_cached: N_c, the blocks that are replaced on other steps.
        num_blocks: all blocks.
        gate: the step from which front blocks are replaced instead of rear ones.
    """

    interval: int
    num_cached: int
    num_blocks: int
    gate: int


@dataclass(frozen=True)
class DeltaDiT(Baseline):
    """Delta-DiT. One block at least is always computed."""

    name: str = "Delta-DiT"

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks."""
        return why_no_blocks(pipe)

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The share of blocks that a run computes; interval and number of blocks follow."""
        return Parameter("computed share of blocks", 0.1, 1.0, saves=False)

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Compute about ``value`` of the blocks."""
        setting = choose_setting(value, len(find_blocks(one_network(pipe))), num_steps)
        return attach_blocks(
            pipe,
            lambda: BlockRun(lambda call: decide(setting, call)),
            num_inference_steps=num_steps,
        )


def choose_setting(share: float, num_blocks: int, num_steps: int) -> DeltaSetting:
    """The smallest interval that can reach a share of computed blocks, and the blocks it needs.

    Example:
        >>> choose_setting(0.5, 9, 30)
        DeltaSetting(interval=3, num_cached=7, num_blocks=9, gate=15)
        >>> choose_setting(1.0, 9, 30).num_cached
        0
    """
    wanted = (1 - share) * num_steps * num_blocks
    intervals = range(2, num_steps + 1)
    partial = {n: num_steps - math.ceil(num_steps / n) for n in intervals}  # steps between
    fitting = (n for n in intervals if partial[n] * (num_blocks - 1) >= wanted - 1e-6)
    interval = next(fitting, max(num_steps, 2))
    between = partial.get(interval, 0)
    cached = min(num_blocks - 1, math.floor(wanted / between + 0.5)) if between else 0
    return DeltaSetting(interval, cached, num_blocks, num_steps // 2)


def decide(setting: DeltaSetting, call: BlockCall) -> Decision:
    """Compute and record on every N-th step, else replace the rear or the front blocks."""
    n, c = setting.num_blocks, setting.num_cached
    rear, front = range(n - c, n), range(c)
    if c == 0:
        return Decision()
    if call.step % setting.interval == 0:
        return Decision(record=(rear, front))
    return Decision(reuse=(rear if call.step < setting.gate else front,))
