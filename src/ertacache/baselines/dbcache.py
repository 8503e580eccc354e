"""DBCache, alone and with the forecasts of TaylorSeer, DMD or FoCa, run from cache-dit.

The first block is always computed; when its residual has changed by less than a threshold, that of
the others is reused, or forecast: by a Taylor expansion, by dynamic mode decomposition (where at
least four of the last six are evenly spaced), or by FoCa's trapezoidal rule. cache-dit replaces a
method of the pipeline's class while it is enabled, so that only one pipeline of a class may use it
at a time. Needs the extra ``bench``.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ertacache.baselines.base import Parameter
from ertacache.baselines.diffusers_cache import CacheRun, DiffusersCache
from ertacache.baselines.private_api import one_network, tensors_within, why_no_blocks
from ertacache.integration.private_api import Pipeline

__all__ = ["DBCache"]


@dataclass(frozen=True)
class DBCache(DiffusersCache):
    """cache-dit's DBCache with one block computed first and none last.

    It differs from a cache of diffusers in how it is enabled and where its memory is.

    Attributes:
        name: its row in the tables.
        max_warmup_steps: first steps, computed in full.
        calibrator: the kind of forecast, with cache-dit's settings; None reuses residuals as they
            are.
    """

    name: str = "DBCache"
    max_warmup_steps: int = 4
    calibrator: Literal["TaylorSeer", "DMD", "FoCa"] | None = None

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs cache-dit, and that cache-dit knows the pipeline."""
        if importlib.util.find_spec("cache_dit") is None:
            return "cache-dit is not installed: pip install 'ertacache[bench]'"
        from cache_dit import BlockAdapterRegister  # type: ignore[import-untyped, unused-ignore]

        if not BlockAdapterRegister.is_supported(pipe):
            return f"cache-dit has no adapter for {type(pipe).__name__}"
        return why_no_blocks(pipe)

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The threshold of the first residual's relative change."""
        return Parameter("threshold", 1e-4, 100.0, saves=True)

    def config(self, pipe: Pipeline, value: float, num_steps: int) -> dict[str, Any]:
        """The arguments for cache-dit's own call."""
        import cache_dit

        cache = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            max_warmup_steps=self.max_warmup_steps,
            residual_diff_threshold=value,
            num_inference_steps=num_steps,
        )
        if self.calibrator is None:
            return {"cache_config": cache}
        forecast = getattr(cache_dit, f"{self.calibrator}CalibratorConfig")()
        return {"cache_config": cache, "calibrator_config": forecast}

    def enabled(self, pipe: Pipeline, config: Any) -> AbstractContextManager[None]:
        """Enable cache-dit's cache, not one of diffusers."""
        return _enabled(pipe, config)

    def make_run(self, pipe: Pipeline, units: Sequence[nn.Module], config: Any) -> CacheRun:
        """Measure the memory that cache-dit holds."""
        return _DBCacheRun(pipe, units)


class _DBCacheRun(CacheRun):
    def __init__(self, pipe: Pipeline, units: Sequence[nn.Module]) -> None:
        super().__init__(one_network(pipe), units)
        self._pipe = pipe

    def cached(self) -> Iterable[Any]:
        # States of forecasts are lists in objects in dictionaries of objects.
        return tensors_within(vars(self._pipe).get("_context_manager"), depth=10)


@contextmanager
def _enabled(pipe: Pipeline, config: dict[str, Any]) -> Iterator[None]:
    """Enable cache-dit for a while; the attributes that it leaves on modules are removed."""
    import cache_dit

    if getattr(type(pipe), "_is_cached", False):
        raise RuntimeError(
            f"cache-dit is already enabled on a {type(pipe).__name__}: it changes the class, "
            "so that one pipeline at a time can have it; detach the first handle"
        )
    network = one_network(pipe)
    owners: list[nn.Module] = [network, *network.children()]
    before = [set(vars(owner)) for owner in owners]
    with _quiet():
        cache_dit.enable_cache(pipe, **config)
    try:
        yield
    finally:
        with _quiet():
            cache_dit.disable_cache(pipe)
        for owner, names in zip(owners, before, strict=True):
            for name in set(vars(owner)) - names:
                del vars(owner)[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep cache-dit from logging every line of what it does."""
    handlers = logging.getLogger("CACHE_DIT").handlers
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)
