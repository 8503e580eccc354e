"""MagCache (Ma et al. 2025), run from diffusers, with its own calibration.

Ratios of the residual's magnitude from step to step are measured once; the block stack is reused
while their accumulated deviation from 1 stays below a threshold, for at most five steps in a row
and never in the first fifth of a run.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from diffusers import MagCacheConfig

from ertacache.baselines.builtin import (
    attach_cache,
    block_modules,
    enabled,
    why_no_block_cache,
)
from ertacache.baselines.clock import Clock
from ertacache.baselines.compat import hooked, one_network, remember_hooks, reset_caches
from ertacache.baselines.interface import Handle, Knob, Runs, require
from ertacache.integration.compat import Pipeline

__all__ = ["MagCache"]

_HOOK = "mag_cache_leader_block_hook"
_NEVER = 10**9  # as a number of steps: the calibration is read before it is printed and dropped


@dataclass(frozen=True)
class MagCache:
    """MagCache.

    Attributes:
        name: its row in the tables.
        ratios: magnitude ratios, one per step; empty before calibration.
        max_skip_steps: reused steps in a row; the authors' fast setting.
        retention_ratio: share of a run that is computed first.
    """

    name: str = "MagCache"
    ratios: tuple[float, ...] = ()
    max_skip_steps: int = 5
    retention_ratio: float = 0.2

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks of a network on which diffusers offers caches."""
        return why_no_block_cache(pipe)

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The threshold of the accumulated deviation."""
        return Knob("threshold", 1e-5, 100.0, saves=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> MagCache:
        """Measure the ratios as diffusers does, and average them over runs and branches."""
        network = one_network(pipe)
        found: list[list[float]] = []

        def collect() -> None:
            states = hooked(network, _HOOK)[0].state_manager._state_cache.values()
            found.extend(list(state.calibration_ratios) for state in states)

        with ExitStack() as undo:
            undo.callback(remember_hooks(network))
            config = MagCacheConfig(  # type: ignore[no-untyped-call]
                calibrate=True, num_inference_steps=_NEVER
            )
            undo.enter_context(enabled(pipe, config))
            clock = Clock(pipe)
            undo.callback(clock.remove)
            clock.at_start(lambda: reset_caches(network))
            clock.at_end(collect)
            runs()
        if not found:
            raise ValueError("the calibration made no complete run")
        ratios = torch.tensor(found, dtype=torch.float64).mean(0)
        return replace(self, ratios=tuple(ratios.tolist()))

    def config(self, threshold: float, num_inference_steps: int) -> MagCacheConfig:
        """The configuration for diffusers' own call."""
        return MagCacheConfig(  # type: ignore[no-untyped-call]
            threshold=threshold,
            max_skip_steps=self.max_skip_steps,
            retention_ratio=self.retention_ratio,
            num_inference_steps=num_inference_steps,
            mag_ratios=list(self.ratios),
        )

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Reuse under the threshold ``knob``."""
        require(self.applies(pipe))
        if not self.ratios:
            raise ValueError("MagCache has no magnitude ratios: calibrate it first")
        threshold = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        return attach_cache(
            pipe,
            enabled(pipe, self.config(threshold, num_inference_steps)),
            name=self.name,
            num_inference_steps=num_inference_steps,
            hook=_HOOK,
            units=block_modules(pipe),
            unit="blocks",
        )
