"""TaylorSeer (Liu et al. 2025), run from diffusers in its lite form.

After a warm-up every N-th step is computed; on the others no block is run, and the network's last
layer is predicted by a Taylor expansion over the computed steps. The default identifiers hook
nothing in Wan and CogVideoX; lite mode hooks, and a run that reuses nothing raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import TaylorSeerCacheConfig
from torch import nn

from ertacache.baselines.base import Parameter
from ertacache.baselines.diffusers_cache import CacheRun, DiffusersCache
from ertacache.baselines.private_api import one_network
from ertacache.integration.private_api import Pipeline

__all__ = ["TaylorSeer", "choose_interval", "computed_steps"]

_WARM_UP = 3  # diffusers' default


@dataclass(frozen=True)
class TaylorSeer(DiffusersCache):
    """TaylorSeer.

    Attributes:
        name: its row in the tables.
        max_order: of the expansion. Of 1 (diffusers' default), 2 and 3, 2 came closest to the full
            run on calibration prompts of ``emoji-flux`` at half and at a third of the steps.
    """

    name: str = "TaylorSeer"
    max_order: int = 2
    hook = "taylorseer_cache"

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of computed steps; the interval follows."""
        high = num_inference_steps
        low = len(computed_steps(high, high, high))
        return Parameter("computed steps", low, high, saves=False, integer=True, counts_steps=True)

    def config(self, pipe: Pipeline, value: float, num_steps: int) -> TaylorSeerCacheConfig:
        """The configuration for diffusers' own call, with at most ``value`` computed steps."""
        interval, cool_down = choose_interval(num_steps, int(value))
        return TaylorSeerCacheConfig(  # type: ignore[no-untyped-call]
            cache_interval=interval,
            disable_cache_before_step=_WARM_UP,
            disable_cache_after_step=cool_down,
            max_order=self.max_order,
            taylor_factors_dtype=torch.float32,  # rounding is not what is compared
            use_lite_mode=True,
        )

    def make_run(self, pipe: Pipeline, units: Sequence[nn.Module], config: Any) -> CacheRun:
        """Raise if a run that should reuse something does not."""
        kind = CacheRun if config.cache_interval == 1 else _ReusingRun
        return kind(one_network(pipe), units)


class _ReusingRun(CacheRun):
    def end(self) -> None:
        if self.reused == 0:
            raise RuntimeError("TaylorSeer reused nothing in a whole run")


def computed_steps(num_steps: int, interval: int, cool_down: int) -> tuple[int, ...]:
    """The steps that diffusers computes: three first, every N-th from the second behind, the rest.

    Example:
        >>> computed_steps(10, interval=3, cool_down=10)
        (0, 1, 2, 4, 7)
        >>> computed_steps(10, interval=3, cool_down=8)
        (0, 1, 2, 4, 7, 8, 9)
    """
    return tuple(
        k
        for k in range(num_steps)
        if k < _WARM_UP or k >= cool_down or (k - _WARM_UP - 1) % interval == 0
    )


def choose_interval(num_steps: int, budget: int) -> tuple[int, int]:
    """The smallest interval within a budget of computed steps; what is left goes to the end.

    Spent at the end the rest helped more than at the start, on calibration prompts of a bundled
    model: the baseline is shown at its best.

    Example:
        >>> choose_interval(30, 10), choose_interval(30, 15)
        ((4, 30), (3, 25))
        >>> len(computed_steps(30, 4, 30)), len(computed_steps(30, 3, 25))
        (10, 15)
    """
    for interval in range(1, num_steps + 1):
        fitting = [
            cool_down
            for cool_down in range(_WARM_UP, num_steps + 1)
            if len(computed_steps(num_steps, interval, cool_down)) <= budget
        ]
        if fitting:
            return interval, min(fitting)
    raise ValueError(f"no interval computes at most {budget} of {num_steps} steps")
