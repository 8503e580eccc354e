"""SeaCache (2026), run from diffusers.

The relative L1 change of spectrally filtered latents is added up; below a threshold the residual of
the block stack is extrapolated. diffusers expects the step from the pipeline, and most pipelines do
not provide it; then it is provided here, together with the latents in the expected layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers import SeaCacheConfig
from torch import nn

from ertacache.baselines.architectures import LatentVideos, find_architecture
from ertacache.baselines.base import Parameter
from ertacache.baselines.clock import Clock
from ertacache.baselines.diffusers_cache import CacheRun, DiffusersCache, why_no_block_cache
from ertacache.baselines.private_api import one_network
from ertacache.integration.private_api import Pipeline
from ertacache.integration.schedulers import read_sigmas

__all__ = ["SeaCache"]


@dataclass(frozen=True)
class SeaCache(DiffusersCache):
    """SeaCache.

    Attributes:
        name: its row in the tables.
        max_consecutive_cached: reused steps in a row; 0 lets the threshold decide alone.
    """

    name: str = "SeaCache"
    max_consecutive_cached: int = 0
    hook = "sea_cache_leader_block"

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks, and latents that are an image or a video."""
        reason = why_no_block_cache(pipe)
        if reason is None and _latent_videos(pipe) is None:
            return f"SeaCache has no rule for the latents of {type(one_network(pipe)).__name__}"
        return reason

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The threshold of the accumulated change."""
        return Parameter("threshold", 1e-4, 100.0, saves=True)

    def config(self, pipe: Pipeline, value: float, num_steps: int) -> SeaCacheConfig:
        """The configuration for diffusers' own call."""
        videos = _latent_videos(pipe)
        assert videos is not None  # it applies
        return SeaCacheConfig(  # type: ignore[no-untyped-call]
            threshold=value,
            max_consecutive_cached=self.max_consecutive_cached,
            raw_vision_callback=videos.read,
        )

    def make_run(self, pipe: Pipeline, units: Sequence[nn.Module], config: Any) -> CacheRun:
        """Read the noise levels of the run that starts."""
        return _SigmaRun(pipe, units)

    def informed(self, pipe: Pipeline, clock: Clock[Any]) -> AbstractContextManager[None]:
        """Provide step, noise level and number of steps."""
        return _informed(one_network(pipe), clock)


def _latent_videos(pipe: Pipeline) -> LatentVideos | None:
    architecture = find_architecture(one_network(pipe))
    return None if architecture is None else architecture.latent_videos


class _SigmaRun(CacheRun):
    """A run that knows its noise levels."""

    def __init__(self, pipe: Pipeline, units: Sequence[nn.Module]) -> None:
        super().__init__(one_network(pipe), units)
        self.sigmas: list[float] = read_sigmas(pipe.scheduler).tolist()


@contextmanager
def _informed(network: Any, clock: Clock[_SigmaRun]) -> Iterator[None]:
    """Add step, noise level and number of steps to the contexts that a pipeline enters."""
    original = network.cache_context

    @contextmanager
    def cache_context(name: str, **given: Any) -> Iterator[None]:
        run = clock.run
        if run is not None:
            facts = {
                "step_index": run.step,
                "sigma": min(1.0, run.sigmas[run.step]),
                "num_inference_steps": clock.num_steps,
            }
            given = facts | given
        with original(name, **given):
            yield

    network.cache_context = cache_context
    try:
        yield
    finally:
        vars(network).pop("cache_context", None)
