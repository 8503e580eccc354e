"""Fewer steps: no cache at all, the same scheduler with fewer steps.

The row that every cache has to beat. The pipeline is called as always; only the arguments of
``set_timesteps`` are changed, on the instance. Runs begin at the noise level of the full run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from ertacache.baselines.base import Baseline, BaselineHandle, BaselineStats, Parameter
from ertacache.integration.private_api import Pipeline
from ertacache.integration.spacing import same_start

__all__ = ["FewerSteps"]


@dataclass(frozen=True)
class FewerSteps(Baseline):
    """The same pipeline with fewer steps."""

    name: str = "fewer steps"

    def parameter(self, pipe: Pipeline, *, num_inference_steps: int) -> Parameter:
        """The number of steps."""
        return Parameter(
            "steps", 1, num_inference_steps, saves=False, integer=True, counts_steps=True
        )

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        """Turn runs of ``num_steps`` steps into runs of ``value`` steps."""
        if "set_timesteps" in vars(pipe.scheduler):
            raise RuntimeError("something is attached to this scheduler already: detach it first")
        steps, runs = int(value), [0]

        def count() -> None:
            runs[0] += 1

        def stats() -> BaselineStats:
            return BaselineStats("steps", runs[0] * steps, runs[0] * (num_steps - steps))

        with ExitStack() as undo:
            undo.enter_context(same_start(pipe.scheduler, num_steps))
            undo.callback(_shorten(pipe.scheduler, num_steps, steps, count))
            return BaselineHandle(undo.pop_all(), stats)


def _shorten(
    scheduler: Any, full: int, steps: int, started: Callable[[], None]
) -> Callable[[], None]:
    """Replace ``set_timesteps`` of the instance; return a call that restores it."""
    original = scheduler.set_timesteps
    signature = inspect.signature(original)

    @functools.wraps(type(scheduler).set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not scheduler:  # a copy of the instance took the method along
            return type(self).set_timesteps(self, *args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(_shorter(bound.arguments, full, steps))
        result = original(*bound.args, **bound.kwargs)
        started()
        return result

    before = vars(scheduler).get("set_timesteps")
    scheduler.set_timesteps = MethodType(set_timesteps, scheduler)

    def restore() -> None:
        vars(scheduler).pop("set_timesteps", None)
        if before is not None:
            scheduler.set_timesteps = before

    return restore


def _shorter(given: dict[str, Any], full: int, steps: int) -> dict[str, Any]:
    """The arguments of ``set_timesteps`` for ``steps`` steps in place of ``full``.

    Example:
        >>> _shorter({"num_inference_steps": 30, "device": "cpu"}, 30, 15)
        {'num_inference_steps': 15}
        >>> [round(x, 2) for x in _shorter({"sigmas": [1.0, 0.75, 0.5, 0.25]}, 4, 2)["sigmas"]]
        [1.0, 0.5]
    """
    if given.get("timesteps") is not None:
        raise ValueError("a run with timesteps of its own cannot be shortened")
    sigmas, number = given.get("sigmas"), given.get("num_inference_steps")
    length = full if number is None and sigmas is None else number
    length = len(sigmas) if sigmas is not None else length
    if length != full:
        raise ValueError(f"attached for runs of {full} steps, but this one has {length}")
    shorter: dict[str, Any] = {} if number is None else {"num_inference_steps": steps}
    if sigmas is not None:
        schedule = torch.as_tensor(sigmas, dtype=torch.float64)
        # Pipelines that bring sigmas bring these, and let the scheduler shift them.
        if not torch.allclose(schedule, torch.linspace(1, 1 / full, full, dtype=torch.float64)):
            raise ValueError("a run with sigmas of its own cannot be shortened")
        shorter["sigmas"] = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
    return shorter
