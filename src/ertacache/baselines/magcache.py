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
from torch import nn

from ertacache.baselines.base import Parameter, RunPrompts
from ertacache.baselines.clock import Clock
from ertacache.baselines.diffusers_cache import CacheRun, DiffusersCache
from ertacache.baselines.private_api import (
    enabled_cache,
    find_hooks,
    hook_states,
    one_network,
    remember_hooks,
)
from ertacache.integration.private_api import Pipeline

__all__ = ["MagCache"]

_NEVER = 10**9  # as a number of steps: the calibration is read before it is printed and dropped


@dataclass(frozen=True)
class MagCache(DiffusersCache):
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
    hook = "mag_cache_leader_block_hook"

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The threshold of the accumulated deviation."""
        return Parameter("threshold", 1e-5, 100.0, saves=True)

    def calibrate(self, pipe: Pipeline, run_prompts: RunPrompts) -> MagCache:
        """Measure the ratios as diffusers does, and average them over runs and branches."""
        network = one_network(pipe)
        found: list[list[float]] = []
        config = MagCacheConfig(  # type: ignore[no-untyped-call]
            calibrate=True, num_inference_steps=_NEVER
        )
        with ExitStack() as undo:
            undo.callback(remember_hooks(network))
            undo.enter_context(enabled_cache(network, config))
            clock = Clock(pipe, lambda: _CalibrationRun(network, self.hook, found))
            undo.callback(clock.remove)
            run_prompts()
        if not found:
            raise ValueError("the calibration made no complete run")
        ratios = torch.tensor(found, dtype=torch.float64).mean(0)
        return replace(self, ratios=tuple(ratios.tolist()))

    def config(self, pipe: Pipeline, value: float, num_steps: int) -> MagCacheConfig:
        """The configuration for diffusers' own call."""
        if not self.ratios:
            raise ValueError("MagCache has no magnitude ratios: calibrate it first")
        return MagCacheConfig(  # type: ignore[no-untyped-call]
            threshold=value,
            max_skip_steps=self.max_skip_steps,
            retention_ratio=self.retention_ratio,
            num_inference_steps=num_steps,
            mag_ratios=list(self.ratios),
        )


class _CalibrationRun(CacheRun):
    """A run at whose end the ratios of all branches are collected."""

    def __init__(self, network: nn.Module, hook: str, found: list[list[float]]) -> None:
        super().__init__(network, units=())
        self._hook, self._found = hook, found

    def end(self) -> None:
        states = hook_states(find_hooks(self.network, self._hook)[0])
        self._found.extend(list(state.calibration_ratios) for state in states)
