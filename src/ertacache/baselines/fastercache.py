"""FasterCache (Lv et al. 2024), run from diffusers.

On every other step attention is extrapolated from the two before, and the unconditional branch is
predicted from the conditional one through cached differences of low and high frequencies. The
latter needs both branches in one batch: with sequential guidance only attention is reused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from diffusers import FasterCacheConfig
from torch import nn

from ertacache.baselines.builtin import attach_cache, enabled, states_per_branch, why_no_cache
from ertacache.baselines.clock import Clock
from ertacache.baselines.compat import find_attention, one_network
from ertacache.baselines.interface import Handle, Knob, NotApplicableError, Runs, require
from ertacache.integration.compat import Pipeline
from ertacache.integration.fingerprints import current_guidance

__all__ = ["FasterCache"]

_HOOK = "faster_cache_block"
_BATCHED = {"CogVideoXTransformer3DModel": "BFCHW"}
"""Networks whose pipelines batch their guidance branches, with the form of their latents."""
_SINGLE = ("FluxTransformer2DModel", "WanTransformer3DModel", "HunyuanVideoTransformer3DModel")
"""Networks that are given one branch at a time."""
_UNCOND = 641 / 681  # published bounds: the unconditional branch is left out a little later


@dataclass(frozen=True)
class FasterCache:
    """FasterCache with its published intervals, 2 for attention and 5 for guidance.

    Attributes:
        name: its row in the tables.
        weight: of the extrapolation; diffusers' default.
    """

    name: str = "FasterCache"
    weight: float = 0.5

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs to know how a pipeline hands its guidance branches to the network."""
        reason = why_no_cache(pipe)
        kind = type(one_network(pipe)).__name__
        if reason is None and kind not in (*_BATCHED, *_SINGLE):
            return f"FasterCache has no row for how pipelines guide {kind}"
        return reason

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The timestep below which is reused; published: 681."""
        return Knob("timestep", 0.0, 990.0, saves=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> FasterCache:
        """There is nothing to learn."""
        return self

    def config(self, pipe: Any, timestep: float) -> FasterCacheConfig:
        """The configuration for diffusers' own call."""
        form = _BATCHED.get(type(one_network(pipe)).__name__)
        return FasterCacheConfig(  # type: ignore[no-untyped-call]
            spatial_attention_timestep_skip_range=(-1, timestep),
            unconditional_batch_timestep_skip_range=(-1, timestep * _UNCOND),
            attention_weight_callback=lambda _: self.weight,
            tensor_format=form or "BCHW",
            is_guidance_distilled=form is None,
            current_timestep_callback=lambda: pipe.current_timestep,
        )

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Reuse below timestep ``knob``."""
        require(self.applies(pipe))
        timestep = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)
        batched = type(one_network(pipe)).__name__ in _BATCHED
        return attach_cache(
            pipe,
            enabled(pipe, self.config(pipe, timestep)),
            name=self.name,
            num_inference_steps=num_inference_steps,
            hook=_HOOK,
            units=find_attention(one_network(pipe)),
            unit="attention layers",
            prepare=_check_guidance(pipe) if batched else states_per_branch(_HOOK),
        )


def _check_guidance(pipe: Pipeline) -> Callable[[nn.Module, Clock, ExitStack], None]:
    """Refuse a run without guidance: there would be no second half of the batch."""

    def check(branch: int) -> None:
        scale = current_guidance(pipe)
        if scale is not None and scale <= 1:
            raise NotApplicableError("FasterCache predicts the unconditional branch: use guidance")

    return lambda network, clock, undo: clock.at_call(check)
