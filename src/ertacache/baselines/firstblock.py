"""First Block Cache, run from diffusers.

The first block is always computed; when its residual has changed by less than a threshold since the
last full call, the cached residual of all others is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusers import FirstBlockCacheConfig

from ertacache.baselines.builtin import attach_cache, block_modules, enabled, why_no_block_cache
from ertacache.baselines.interface import Handle, Knob, Runs, require
from ertacache.integration.compat import Pipeline

__all__ = ["FirstBlockCache"]


@dataclass(frozen=True)
class FirstBlockCache:
    """First Block Cache."""

    name: str = "FirstBlockCache"

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks of a network on which diffusers offers caches."""
        return why_no_block_cache(pipe)

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The threshold of the first residual's relative change."""
        return Knob("threshold", 1e-4, 100.0, saves=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> FirstBlockCache:
        """There is nothing to learn."""
        return self

    def config(self, threshold: float) -> FirstBlockCacheConfig:
        """The configuration for diffusers' own call."""
        return FirstBlockCacheConfig(threshold=threshold)  # type: ignore[no-untyped-call]

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Reuse under the threshold ``knob``."""
        require(self.applies(pipe))
        threshold = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        return attach_cache(
            pipe,
            enabled(pipe, self.config(threshold)),
            name=self.name,
            num_inference_steps=num_inference_steps,
            hook="fbc_leader_block_hook",
            units=block_modules(pipe),
            unit="blocks",
        )
