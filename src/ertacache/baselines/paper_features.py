"""The paper's method applied where TeaCache caches: the residual of the block stack is reused.

The compute schedule comes from the paper's threshold search (Algorithm 2), run on the residuals of
full runs; on every other step the network's head gets its new input plus the last residual.
Timestep adjustment and rectification act on outputs and are not part of this variant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ertacache.baselines.base import Baseline, BaselineHandle, Parameter, RunPrompts
from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, attach_blocks
from ertacache.baselines.private_api import find_blocks, one_network, why_no_blocks
from ertacache.core.paper import pick_schedule, sweep_profile
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["PaperFeatures"]


@dataclass(frozen=True)
class PaperFeatures(Baseline):
    """ERTACache's offline policy with ``reuse="features"``.

    Attributes:
        name: its row in the tables.
        schedules: the compute schedules by threshold, from calibration.
    """

    name: str = "ertacache-paper (features)"
    schedules: tuple[tuple[float, tuple[int, ...]], ...] = ()

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks."""
        return why_no_blocks(pipe)

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of computed steps; the threshold follows."""
        low, high = min(2, num_inference_steps), num_inference_steps
        return Parameter("computed steps", low, high, saves=False, integer=True, counts_steps=True)

    def calibrate(self, pipe: Pipeline, run_prompts: RunPrompts) -> PaperFeatures:
        """Find every compute schedule that Algorithm 2 gives on the residuals of full runs."""
        l1, norm = _profile(pipe, run_prompts)
        return replace(self, schedules=tuple(sweep_profile(l1, norm).items()))

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Compute at most ``value`` steps, those that the threshold search prefers."""
        if not self.schedules:
            raise ValueError(f"{self.name} has no schedules: calibrate it first")
        _, steps = pick_schedule(dict(self.schedules), int(value))
        computed, everything = frozenset(steps), _whole_stack(pipe)

        def rule(call: BlockCall) -> Decision:
            if call.step in computed:
                return Decision(record=(everything,))
            return Decision(reuse=(everything,))

        return attach_blocks(pipe, lambda: BlockRun(rule), num_inference_steps=num_steps)


def _whole_stack(pipe: Pipeline) -> range:
    return range(len(find_blocks(one_network(pipe))))


def _profile(pipe: Pipeline, run_prompts: RunPrompts) -> tuple[Tensor, Tensor]:
    """L1 distances between the residuals of any two steps, and their norms, run by run."""
    everything, found = _whole_stack(pipe), list[tuple[Tensor, Tensor]]()
    with attach_blocks(pipe, lambda: _ResidualRun(everything, found)):
        run_prompts()
    if not found:
        raise ValueError("the calibration made no complete run")
    return torch.stack([l1 for l1, _ in found]), torch.stack([norm for _, norm in found])


class _ResidualRun(BlockRun):
    """A run that keeps the residual of the block stack at every step, branch by branch."""

    def __init__(self, everything: range, found: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._everything, self._found = everything, found
        self._residuals: dict[int, list[Tensor]] = {}

    def decide(self, call: BlockCall) -> Decision:
        return Decision(record=(self._everything,))

    def call(self, call: NetworkCall) -> Any:
        output = call.compute()
        self._residuals.setdefault(self.branch, []).append(self.delta(self._everything).cpu())
        return output

    def end(self) -> None:
        self._found.append(_distances(self._residuals))


def _distances(residuals: dict[int, list[Tensor]]) -> tuple[Tensor, Tensor]:
    """L1 distances (T, T) and norms (T,), added up over the guidance branches."""
    steps = len(residuals[0])
    l1 = torch.zeros(steps, steps, dtype=torch.float64)
    norm = torch.zeros(steps, dtype=torch.float64)
    for branch in residuals.values():
        flat = torch.stack(branch).flatten(1).double()
        l1 += torch.stack([(flat - row).abs().sum(1) for row in flat])
        norm += flat.abs().sum(1)
    return l1, norm
