"""FasterCache (Lv et al. 2024), run from diffusers.

On every other step attention is extrapolated from the two before, and the unconditional branch is
predicted from the conditional one through cached differences of low and high frequencies. The
latter needs both branches in one batch: with sequential guidance only attention is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusers import FasterCacheConfig
from torch import nn

from ertacache.baselines.architectures import GuidanceBatch, find_architecture
from ertacache.baselines.base import NotApplicableError, Parameter
from ertacache.baselines.diffusers_cache import (
    CacheRun,
    DiffusersCache,
    SplitCacheRun,
    why_no_cache,
)
from ertacache.baselines.private_api import one_network
from ertacache.integration.identity import current_guidance
from ertacache.integration.private_api import Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["FasterCache"]

_UNCONDITIONAL = 641 / 681  # published bounds: the unconditional branch is predicted a little later


@dataclass(frozen=True)
class FasterCache(DiffusersCache):
    """FasterCache with its published intervals, 2 for attention and 5 for guidance.

    Attributes:
        name: its row in the tables.
        weight: of the extrapolation; diffusers' default.
    """

    name: str = "FasterCache"
    weight: float = 0.5
    hook = "faster_cache_block"
    unit = "attention layers"

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs to know how a pipeline passes its guidance branches to the network."""
        reason = why_no_cache(pipe)
        if reason is None and _guidance(pipe) is None:
            kind = type(one_network(pipe)).__name__
            return f"FasterCache has no row for how pipelines guide {kind}"
        return reason

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The timestep below which is reused; published: 681."""
        return Parameter("timestep", 0.0, 990.0, saves=True)

    def config(self, pipe: Any, value: float, num_steps: int) -> FasterCacheConfig:
        """The configuration for diffusers' own call."""
        guidance = _guidance(pipe)
        assert guidance is not None  # it applies
        return FasterCacheConfig(  # type: ignore[no-untyped-call]
            spatial_attention_timestep_skip_range=(-1, value),
            unconditional_batch_timestep_skip_range=(-1, value * _UNCONDITIONAL),
            attention_weight_callback=lambda _: self.weight,
            tensor_format=guidance.tensor_format,
            is_guidance_distilled=not guidance.batched,
            current_timestep_callback=lambda: pipe.current_timestep,
        )

    def make_run(self, pipe: Pipeline, units: Sequence[nn.Module], config: Any) -> CacheRun:
        """Keep the branches of guidance apart, or check that the batch has both."""
        guidance = _guidance(pipe)
        if guidance is not None and guidance.batched:
            return _GuidedRun(pipe, units)
        return SplitCacheRun(one_network(pipe), units, self.hook)


def _guidance(pipe: Pipeline) -> GuidanceBatch | None:
    architecture = find_architecture(one_network(pipe))
    return None if architecture is None else architecture.guidance


class _GuidedRun(CacheRun):
    """Refuses a run without guidance: there would be no second half of the batch."""

    def __init__(self, pipe: Pipeline, units: Sequence[nn.Module]) -> None:
        super().__init__(one_network(pipe), units)
        self._pipe = pipe

    def call(self, call: NetworkCall) -> Any:
        if any(scale <= 1 for scale in current_guidance(self._pipe).get("guidance_scale", ())):
            raise NotApplicableError("FasterCache predicts the unconditional branch: use guidance")
        return super().call(call)
