"""The paper's method read as TeaCache reads it: what is cached is the residual of the block stack.

The computed steps come from the paper's threshold search (Algorithm 2), run on the residuals of
untouched runs; on every other step the network's head sees its fresh input plus the last residual.
Timestep adjustment and rectification act on outputs and are no part of this reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ertacache.baselines.blocks import BlockCall, BlockStack, Decision
from ertacache.baselines.clock import Clock
from ertacache.baselines.compat import find_blocks, one_network, why_no_blocks
from ertacache.baselines.interface import Handle, Knob, Runs, require
from ertacache.core.plan import check_compute_steps
from ertacache.core.threshold import pick_schedule, sweep_profile
from ertacache.integration.compat import Pipeline

__all__ = ["PaperFeatures", "attach_features"]


@dataclass(frozen=True)
class PaperFeatures:
    """ERTACache's offline policy with ``reuse="features"``.

    Attributes:
        name: its row in the tables.
        schedules: the computed steps by threshold, from calibration.
    """

    name: str = "ertacache-paper (features)"
    schedules: tuple[tuple[float, tuple[int, ...]], ...] = ()

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks."""
        return why_no_blocks(pipe)

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The number of computed steps; the threshold follows."""
        low = min(2, num_inference_steps)
        return Knob("computed steps", low, num_inference_steps, saves=False, integer=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> PaperFeatures:
        """Find every schedule that Algorithm 2 gives on the residuals of untouched runs."""
        l1, norm = _profile(pipe, runs)
        return replace(self, schedules=tuple(sweep_profile(l1, norm).items()))

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Compute at most ``knob`` steps, those that the threshold search prefers."""
        require(self.applies(pipe))
        if not self.schedules:
            raise ValueError(f"{self.name} has no schedules: calibrate it first")
        budget = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        _, steps = pick_schedule(dict(self.schedules), int(budget))
        return attach_features(pipe, steps, num_inference_steps=num_inference_steps)


def attach_features(
    pipe: Pipeline, compute_steps: Sequence[int], *, num_inference_steps: int
) -> Handle:
    """Reuse the residual of the block stack on all but the given steps."""
    computed = frozenset(check_compute_steps(compute_steps, num_inference_steps))
    network = one_network(pipe)
    everything = (range(len(find_blocks(network))),)

    def rule(call: BlockCall) -> Decision:
        if call.step in computed:
            return Decision(record=everything)
        return Decision(reuse=everything)

    with ExitStack() as undo:
        clock = Clock(pipe, num_steps=num_inference_steps)
        undo.callback(clock.remove)
        stack = BlockStack(network, clock, rule)
        undo.callback(stack.remove)
        kept = undo.pop_all()
    return Handle(kept, lambda: stack.stats)


def _profile(pipe: Pipeline, runs: Runs) -> tuple[Tensor, Tensor]:
    """L1 distances between the residuals of any two steps, and their norms, run by run."""
    network = one_network(pipe)
    everything = range(len(find_blocks(network)))
    residuals: dict[int, list[Tensor]] = {}
    found: list[tuple[Tensor, Tensor]] = []

    def keep(compute: Callable[[], Any]) -> Any:
        output = compute()
        residuals.setdefault(clock.branch, []).append(stack.delta(clock.branch, everything).cpu())
        return output

    with ExitStack() as undo:
        clock = Clock(pipe, around=keep)
        undo.callback(clock.remove)
        clock.at_start(residuals.clear)
        clock.at_end(lambda: found.append(_distances(residuals)))
        stack = BlockStack(network, clock, lambda call: Decision(record=(everything,)))
        undo.callback(stack.remove)
        runs()
    if not found:
        raise ValueError("the calibration made no complete run")
    return torch.stack([l1 for l1, _ in found]), torch.stack([norm for _, norm in found])


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
