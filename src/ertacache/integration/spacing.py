"""Runs of fewer steps that begin where the full run begins.

With ``timestep_spacing="leading"`` a run of fewer steps begins at less noise, and so ends with
another image than the full run whatever its solver does. Compared with it, any cache would look
better than it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from ertacache.integration.private_api import Scheduler

__all__ = ["same_start"]


@contextmanager
def same_start(scheduler: Scheduler, num_steps: int) -> Iterator[None]:
    """Let runs of the scheduler begin at the noise level at which one of ``num_steps`` begins.

    Only schedulers with leading timesteps are changed, until the end of the block.

    Example:
        >>> from diffusers import DDIMScheduler
        >>> scheduler = DDIMScheduler(timestep_spacing="leading", steps_offset=1)
        >>> scheduler.set_timesteps(20), scheduler.set_timesteps(5)
        (None, None)
        >>> scheduler.timesteps.tolist()
        [801, 601, 401, 201, 1]
        >>> with same_start(scheduler, 20):
        ...     scheduler.set_timesteps(5)
        >>> scheduler.timesteps.tolist()
        [951, 751, 551, 351, 151]
    """
    if getattr(scheduler.config, "timestep_spacing", None) != "leading":
        yield
        return
    kind: Any = type(scheduler)
    full = kind.from_config(scheduler.config)
    full.set_timesteps(num_steps)
    first, before = int(full.timesteps[0]), vars(scheduler).get("set_timesteps")
    original = scheduler.set_timesteps

    @functools.wraps(type(scheduler).set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, offset = original(*args, **kwargs), self.config.steps_offset
        gap = first - int(self.timesteps[0])
        if gap > 0:
            self.register_to_config(steps_offset=offset + gap)
            try:
                result = original(*args, **kwargs)
            finally:
                self.register_to_config(steps_offset=offset)
        return result

    scheduler.set_timesteps = MethodType(set_timesteps, scheduler)
    try:
        yield
    finally:
        vars(scheduler).pop("set_timesteps")
        if before is not None:
            scheduler.set_timesteps = before
