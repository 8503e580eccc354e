"""First Block Cache, run from diffusers.

The first block is always computed; when its residual has changed by less than a threshold since the
last full call, the cached residual of all others is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusers import FirstBlockCacheConfig

from ertacache.baselines.base import Parameter
from ertacache.baselines.diffusers_cache import DiffusersCache
from ertacache.integration.private_api import Pipeline

__all__ = ["FirstBlockCache"]


@dataclass(frozen=True)
class FirstBlockCache(DiffusersCache):
    """First Block Cache."""

    name: str = "FirstBlockCache"
    hook = "fbc_leader_block_hook"

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The threshold of the first residual's relative change."""
        return Parameter("threshold", 1e-4, 100.0, saves=True)

    def config(self, pipe: Pipeline, value: float, num_steps: int) -> FirstBlockCacheConfig:
        """The configuration for diffusers' own call."""
        return FirstBlockCacheConfig(threshold=value)  # type: ignore[no-untyped-call]
