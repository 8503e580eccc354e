"""Pyramid Attention Broadcast (Zhao et al. 2024), run from diffusers.

Attention outputs are reused on all but every N-th step while the timestep is in a range; attention
over time, which changes less, twice as long, and cross-attention three times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers import PyramidAttentionBroadcastConfig

from ertacache.baselines.builtin import attach_cache, enabled, states_per_branch, why_no_cache
from ertacache.baselines.compat import find_attention, one_network
from ertacache.baselines.interface import Handle, Knob, Runs, require
from ertacache.integration.compat import Pipeline

__all__ = ["PAB"]

_HOOK = "pyramid_attention_broadcast"


@dataclass(frozen=True)
class Published:
    """What is published for a network.

    Attributes:
        timesteps: the range in which attention is reused.
        spatial: where attention over space is; diffusers' own names if empty.
        temporal: where attention over time is, if a network keeps it apart.
    """

    timesteps: tuple[int, int] = (100, 850)
    spatial: tuple[str, ...] = ()
    temporal: tuple[str, ...] = ()


# Open-Sora's table of reused feed-forward layers is not among what diffusers implements.
PUBLISHED = {
    "CogVideoXTransformer3DModel": Published(),
    "OpenSoraTransformer3DModel": Published((450, 930), ("spatial_blocks",), ("temporal_blocks",)),
}


@dataclass(frozen=True)
class PAB:
    """Pyramid Attention Broadcast.

    Attributes:
        name: its row in the tables.
        timesteps: the range in which attention is reused; None is the published one, for other
            networks that of CogVideoX.
    """

    name: str = "PAB"
    timesteps: tuple[int, int] | None = None

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs a network on which diffusers offers caches."""
        return why_no_cache(pipe)

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """N: self-attention is computed on every N-th step of the range."""
        return Knob("block skip range", 1, 20, saves=True, integer=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> PAB:
        """There is nothing to learn."""
        return self

    def config(self, pipe: Any, skip_range: int) -> PyramidAttentionBroadcastConfig:
        """The configuration for diffusers' own call."""
        known = PUBLISHED.get(type(one_network(pipe)).__name__, Published())
        timesteps = self.timesteps or known.timesteps
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

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Compute attention on every ``knob``-th step of the range."""
        require(self.applies(pipe))
        skip_range = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        return attach_cache(
            pipe,
            enabled(pipe, self.config(pipe, int(skip_range))),
            name=self.name,
            num_inference_steps=num_inference_steps,
            hook=_HOOK,
            units=find_attention(one_network(pipe)),
            unit="attention layers",
            prepare=states_per_branch(_HOOK),
        )
