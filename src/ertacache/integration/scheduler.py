"""``set_timesteps`` and ``step`` of one scheduler instance, routed through two callbacks.

The instance keeps its class, its signatures and its state; copies of it behave like the class.
Knows no policy: what is done with a step is up to the callback.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor

from ertacache.formats.policy import PolicyError
from ertacache.integration.compat import Scheduler

__all__ = ["SchedulerPatch", "StepCall", "check_plain"]

_PLAIN = frozenset({"model_output", "timestep", "sample", "return_dict", "generator"})
_MARK = "_ertacache"


@dataclass(frozen=True, eq=False)
class StepCall:
    """One call of ``scheduler.step``.

    Attributes:
        bound: the arguments that were given, by name.
        original: the method as it was before.
    """

    bound: inspect.BoundArguments
    original: Callable[..., Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return self.bound.arguments

    @property
    def model_output(self) -> Tensor:
        """The combined output v."""
        v: Tensor = self.arguments["model_output"]
        return v

    @property
    def sample(self) -> Tensor:
        """The latent x."""
        x: Tensor = self.arguments["sample"]
        return x

    @property
    def timestep(self) -> Any:
        """The timestep, as the pipeline gave it."""
        return self.arguments["timestep"]

    @property
    def return_dict(self) -> bool:
        """Whether the caller wants the scheduler's output class."""
        return bool(self.arguments.get("return_dict", True))

    def stock(self, model_output: Tensor | None = None) -> Any:
        """Take the scheduler's own step, with this output in place of the one given."""
        if model_output is not None:
            self.bound.arguments["model_output"] = model_output
        return self.original(*self.bound.args, **self.bound.kwargs)


class SchedulerPatch:
    """Two methods of an instance replaced, until ``remove``."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        on_start: Callable[[], None],
        on_step: Callable[[StepCall], Any],
    ) -> None:
        """Replace the methods; raise if they are replaced already.

        Args:
            scheduler: the instance.
            on_start: called after each ``set_timesteps``.
            on_step: called in place of ``step``; returns what the caller gets.
        """
        owner = getattr(vars(scheduler).get("step"), _MARK, None)
        if owner is not None and owner != id(scheduler):  # a copy took our methods along
            self.strip(scheduler)
        elif owner is not None:
            raise RuntimeError(
                f"ertacache is already attached to this {type(scheduler).__name__}: "
                "call detach() on the first handle"
            )
        self._scheduler = scheduler
        names = ("set_timesteps", "step")
        self._before = {name: vars(scheduler)[name] for name in names if name in vars(scheduler)}
        scheduler.set_timesteps = self._make_set_timesteps(on_start)
        scheduler.step = self._make_step(on_step)

    def remove(self) -> None:
        """Put the instance's methods back."""
        self.strip(self._scheduler)
        vars(self._scheduler).update(self._before)

    @staticmethod
    def strip(scheduler: Scheduler) -> None:
        """Take replaced methods off an instance."""
        for name in ("set_timesteps", "step"):
            vars(scheduler).pop(name, None)

    def _make_set_timesteps(self, on_start: Callable[[], None]) -> MethodType:
        mine, original = self._scheduler, self._scheduler.set_timesteps

        @functools.wraps(type(mine).set_timesteps)
        def set_timesteps(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
            if self is not mine:  # a copy of the instance took the method along
                return type(self).set_timesteps(self, *args, **kwargs)
            result = original(*args, **kwargs)
            on_start()
            return result

        return MethodType(set_timesteps, mine)

    def _make_step(self, on_step: Callable[[StepCall], Any]) -> MethodType:
        mine, original = self._scheduler, self._scheduler.step
        # The class's own: a method that someone put on the instance may take anything.
        signature = inspect.signature(MethodType(type(mine).step, mine))

        @functools.wraps(type(mine).step)
        def step(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
            if self is not mine:
                return type(self).step(self, *args, **kwargs)
            return on_step(StepCall(signature.bind(*args, **kwargs), original))

        setattr(step, _MARK, id(mine))
        return MethodType(step, mine)


def check_plain(call: StepCall, scheduler: Scheduler) -> None:
    """Raise if a step was asked for noise or anything else that the methods do not see."""
    parameters = inspect.signature(type(scheduler).step).parameters
    for name, value in call.arguments.items():
        if name in _PLAIN or value is None or name not in parameters:
            continue
        default = parameters[name].default
        if isinstance(value, Tensor) or value != default:
            raise PolicyError(
                f"the pipeline passes {name} to {type(scheduler).__name__}.step, which changes the "
                f"step in a way that no policy sees: leave it at {default!r}"
            )
