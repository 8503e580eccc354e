"""SeaCache (2026), run from diffusers.

The relative L1 change of spectrally filtered latents is added up; below a threshold the residual of
the block stack is extrapolated. diffusers reads the step from the pipeline, and most pipelines do
not tell; then it is told here, together with the latents in the form it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers import SeaCacheConfig
from torch import Tensor, nn

from ertacache.baselines.builtin import attach_cache, block_modules, enabled, why_no_block_cache
from ertacache.baselines.clock import Clock
from ertacache.baselines.compat import one_network
from ertacache.baselines.interface import Handle, Knob, Runs, require
from ertacache.integration import read_sigmas
from ertacache.integration.compat import Pipeline

__all__ = ["SeaCache"]

Vision = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], list[Tensor] | None]


@dataclass(frozen=True)
class SeaCache:
    """SeaCache.

    Attributes:
        name: its row in the tables.
        max_consecutive_cached: reused steps in a row; 0 lets the threshold decide alone.
    """

    name: str = "SeaCache"
    max_consecutive_cached: int = 0

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks, and latents that are a picture or a video."""
        reason = why_no_block_cache(pipe)
        kind = type(one_network(pipe)).__name__
        if reason is None and kind not in _VISION:
            return f"SeaCache has no rule for the latents of {kind}"
        return reason

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The threshold of the accumulated change."""
        return Knob("threshold", 1e-4, 100.0, saves=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> SeaCache:
        """There is nothing to learn."""
        return self

    def config(self, pipe: Pipeline, threshold: float) -> SeaCacheConfig:
        """The configuration for diffusers' own call."""
        return SeaCacheConfig(  # type: ignore[no-untyped-call]
            threshold=threshold,
            max_consecutive_cached=self.max_consecutive_cached,
            raw_vision_callback=_VISION[type(one_network(pipe)).__name__],
        )

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Reuse under the threshold ``knob``."""
        require(self.applies(pipe))
        threshold = self.knob(pipe, num_inference_steps=num_inference_steps).check(knob)

        def prepare(network: nn.Module, clock: Clock, undo: ExitStack) -> None:
            undo.enter_context(_told(network, clock, pipe))

        return attach_cache(
            pipe,
            enabled(pipe, self.config(pipe, threshold)),
            name=self.name,
            num_inference_steps=num_inference_steps,
            hook="sea_cache_leader_block",
            units=block_modules(pipe),
            unit="blocks",
            prepare=prepare,
        )


@contextmanager
def _told(network: Any, clock: Clock, pipe: Pipeline) -> Iterator[None]:
    """Add step, noise level and number of steps to the contexts that a pipeline enters."""
    original = network.cache_context
    sigmas: list[float] = []
    clock.at_start(lambda: sigmas.__setitem__(slice(None), read_sigmas(pipe.scheduler).tolist()))

    @contextmanager
    def cache_context(name: str, **told: Any) -> Iterator[None]:
        if clock.step is not None:
            facts = {
                "step_index": clock.step,
                "sigma": min(1.0, sigmas[clock.step]),
                "num_inference_steps": clock.num_steps,
            }
            told = facts | told
        with original(name, **told):
            yield

    network.cache_context = cache_context
    try:
        yield
    finally:
        vars(network).pop("cache_context", None)


def _packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Flux: tokens (B, N, C) with their places, as pictures (C, 1, H, W)."""
    places: Tensor = kwargs["img_ids"]
    height, width = (int(places[..., axis].max()) + 1 for axis in (1, 2))
    tokens: Tensor = kwargs["hidden_states"]
    return [one.T.reshape(-1, 1, height, width) for one in tokens]


def _frames_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """CogVideoX: videos (B, F, C, H, W)."""
    videos: Tensor = kwargs["hidden_states"]
    return list(videos.transpose(1, 2).unbind(0))


_VISION: dict[str, Vision | None] = {
    "FluxTransformer2DModel": _packed,
    "CogVideoXTransformer3DModel": _frames_first,
    "WanTransformer3DModel": None,  # diffusers has its own
}
