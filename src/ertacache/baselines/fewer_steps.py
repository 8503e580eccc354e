"""Fewer steps: no cache at all, the scheduler is asked for a shorter table.

A method that does not beat this row is worth nothing. The pipeline is called as ever; only what it
asks of ``set_timesteps`` is changed, on the instance.
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

from ertacache.baselines.interface import Handle, Knob, Runs, Stats
from ertacache.integration.compat import Pipeline

__all__ = ["FewerSteps"]


@dataclass(frozen=True)
class FewerSteps:
    """The same pipeline with fewer steps."""

    name: str = "fewer steps"

    def applies(self, pipe: Pipeline) -> str | None:
        """It works with every pipeline."""
        return None

    def knob(self, pipe: Pipeline, *, num_inference_steps: int) -> Knob:
        """The number of steps."""
        return Knob("steps", 1, num_inference_steps, saves=False, integer=True)

    def calibrate(self, pipe: Pipeline, runs: Runs) -> FewerSteps:
        """There is nothing to learn."""
        return self

    def attach(self, pipe: Pipeline, knob: float, *, num_inference_steps: int) -> Handle:
        """Turn runs of ``num_inference_steps`` steps into runs of ``knob`` steps."""
        full = num_inference_steps
        steps = int(self.knob(pipe, num_inference_steps=full).check(knob))
        runs = [0]

        def count() -> None:
            runs[0] += 1

        with ExitStack() as undo:
            undo.callback(_shorten(pipe.scheduler, full, steps, count))
            kept = undo.pop_all()
        return Handle(kept, lambda: Stats("steps", runs[0] * steps, runs[0] * (full - steps)))


def _shorten(
    scheduler: Any, full: int, steps: int, started: Callable[[], None]
) -> Callable[[], None]:
    """Replace ``set_timesteps`` of the instance; return what puts it back."""
    if "set_timesteps" in vars(scheduler):
        raise RuntimeError("something is attached to this scheduler already: detach it first")
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

    scheduler.set_timesteps = MethodType(set_timesteps, scheduler)

    def restore() -> None:
        vars(scheduler).pop("set_timesteps", None)

    return restore


def _shorter(asked: dict[str, Any], full: int, steps: int) -> dict[str, Any]:
    """What a pipeline asks of ``set_timesteps`` when it is called with ``steps`` steps.

    Example:
        >>> _shorter({"num_inference_steps": 30, "device": "cpu"}, 30, 15)
        {'num_inference_steps': 15}
        >>> [round(x, 2) for x in _shorter({"sigmas": [1.0, 0.75, 0.5, 0.25]}, 4, 2)["sigmas"]]
        [1.0, 0.5]
    """
    if asked.get("timesteps") is not None:
        raise ValueError("a run with timesteps of its own cannot be shortened")
    sigmas, number = asked.get("sigmas"), asked.get("num_inference_steps")
    given = full if number is None and sigmas is None else number
    given = len(sigmas) if sigmas is not None else given
    if given != full:
        raise ValueError(f"attached for runs of {full} steps, but this one asks for {given}")
    shorter: dict[str, Any] = {} if number is None else {"num_inference_steps": steps}
    if sigmas is not None:
        table = torch.as_tensor(sigmas, dtype=torch.float64)
        # Pipelines that bring sigmas bring these, and let the scheduler shift them.
        if not torch.allclose(table, torch.linspace(1, 1 / full, full, dtype=torch.float64)):
            raise ValueError("a run with sigmas of its own cannot be shortened")
        shorter["sigmas"] = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
    return shorter
