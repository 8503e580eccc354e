"""Pyramid Attention Broadcast (Zhao et al. 2024), run from diffusers.

Attention outputs are reused on all but every N-th step while the timestep is in a range; attention
over time, which changes less, twice as long, and cross-attention three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusers import PyramidAttentionBroadcastConfig
from torch import nn

from ertacache.baselines.architectures import AttentionRanges, find_architecture
from ertacache.baselines.base import Parameter
from ertacache.baselines.diffusers_cache import (
    CacheRun,
    DiffusersCache,
    SplitCacheRun,
    why_no_cache,
)
from ertacache.baselines.private_api import one_network
from ertacache.integration.private_api import Pipeline

__all__ = ["PAB"]


@dataclass(frozen=True)
class PAB(DiffusersCache):
    """Pyramid Attention Broadcast.

    Attributes:
        name: its row in the tables.
        timesteps: the range in which attention is reused; None is the published one, for other
            networks that of CogVideoX.
    """

    name: str = "PAB"
    timesteps: tuple[int, int] | None = None
    hook = "pyramid_attention_broadcast"
    unit = "attention layers"

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs a network on which diffusers offers caches."""
        return why_no_cache(pipe)

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """N: self-attention is computed on every N-th step of the range."""
        return Parameter("block skip range", 1, 20, saves=True, integer=True)

    def config(self, pipe: Any, value: float, num_steps: int) -> PyramidAttentionBroadcastConfig:
        """The configuration for diffusers' own call."""
        architecture = find_architecture(one_network(pipe))
        known = AttentionRanges() if architecture is None else architecture.attention
        timesteps, skip_range = self.timesteps or known.timesteps, int(value)
        # A range of 1 reuses nothing, and must not become a longer one.
        twice, thrice = (n * skip_range if skip_range > 1 else 1 for n in (2, 3))
        more: dict[str, Any] = {}
        if known.spatial:
            more["spatial_attention_block_identifiers"] = known.spatial
        if known.temporal:
            more["temporal_attention_block_identifiers"] = known.temporal
            more["temporal_attention_block_skip_range"] = twice
            more["temporal_attention_timestep_skip_range"] = timesteps
            more["cross_attention_block_identifiers"] = known.spatial + known.temporal
        return PyramidAttentionBroadcastConfig(  # type: ignore[no-untyped-call]
            spatial_attention_block_skip_range=skip_range,
            cross_attention_block_skip_range=thrice,
            spatial_attention_timestep_skip_range=timesteps,
            cross_attention_timestep_skip_range=timesteps,
            current_timestep_callback=lambda: pipe.current_timestep,
            **more,
        )

    def make_run(self, pipe: Pipeline, units: Sequence[nn.Module], config: Any) -> CacheRun:
        """Keep the branches of guidance apart."""
        return SplitCacheRun(one_network(pipe), units, self.hook)
