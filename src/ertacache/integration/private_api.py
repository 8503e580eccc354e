"""All uses of private diffusers and accelerate APIs of this layer: hooks, counters, histories.

How a hook reaches the network (outermost first)::

    module.forward                      _Forward, which a copy of the module does not take along
      -> accelerate's forward           only with offloading, which may sit above or below ours
      -> HookRegistry's chain           the hooks of the module, newest first; ours is HOOK
           -> our hook.new_forward      tracker.NetworkHook
                -> hook.fn_ref.original_forward     whatever was there before
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Protocol

from diffusers.hooks import HookRegistry, ModelHook  # type: ignore[attr-defined]
from torch import Tensor, nn

__all__ = [
    "HOOK",
    "DetachedHook",
    "HookRegistration",
    "ModelHook",
    "Pipeline",
    "ProgressBarWatcher",
    "Scheduler",
    "begin_index",
    "check_free",
    "clear_history",
    "final_alpha",
    "find_hook",
    "forget_run",
    "fresh_copy",
    "keeps_history",
    "set_step_index",
    "shallow_copy",
    "unwrap",
]

HOOK = "ertacache"
"""Name of our hook in a module's registry."""

_FRESH: dict[str, object] = {
    "_step_index": None,
    "lower_order_nums": 0,
    "last_sample": None,
    "sample": None,  # of DPMSolverSinglestepScheduler
}


class Scheduler(Protocol):
    """What is used of a scheduler besides the attributes that only some of them have."""

    timesteps: Tensor
    config: Mapping[str, Any]
    set_timesteps: Callable[..., Any]
    step: Callable[..., Any]


class Pipeline(Protocol):
    """What every pipeline has; its denoisers are found by name."""

    scheduler: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""
        ...


class DetachedHook(ModelHook):
    """What a copy of an attached module has in the place of our hook; it is never called."""

    def __init__(self) -> None:
        """Do nothing."""
        super().__init__()  # type: ignore[no-untyped-call]


def find_hook(module: nn.Module) -> ModelHook | None:
    """Return our hook on a module, None if there is none."""
    registry: Any = vars(module).get("_diffusers_hook")
    hook: ModelHook | None = None if registry is None else registry.hooks.get(HOOK)
    return None if isinstance(hook, DetachedHook) else hook


def check_free(module: nn.Module) -> None:
    """Raise if a hook of ours is on the module."""
    if find_hook(module) is not None:
        raise RuntimeError(
            f"ertacache is already attached to this {type(module).__name__}: "
            "call ertacache.detach(pipe) on the pipeline it is attached to"
        )
    registry: Any = vars(module).get("_diffusers_hook")
    if registry is not None and HOOK in registry.hooks:  # a copy of an attached module
        _forget(registry)


def _forget(registry: Any) -> None:
    """Remove our hook from a registry, without touching the chain of forwards."""
    place = registry._hook_order.index(HOOK)
    del registry.hooks[HOOK]
    registry._hook_order.pop(place)
    registry._fn_refs.pop(place)


class _Forward:
    """A hooked ``forward``; a copy of the module gets what was below, bound to itself."""

    def __init__(self, hooked: Callable[..., Any], hook: ModelHook) -> None:
        functools.update_wrapper(self, hooked)
        self._hooked, self._hook = hooked, hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hooked(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._hook.fn_ref.original_forward, memo)


class HookRegistration:
    """One hook on one module: registered, kept through offloading, removed without a trace."""

    def __init__(self, module: nn.Module, hook: ModelHook) -> None:
        """Register ``hook`` on ``module``; raise if one of ours is there already."""
        check_free(module)
        self._module: Any = module
        self._hook = hook
        self._had_registry = "_diffusers_hook" in vars(module)
        self._had_forward = "forward" in vars(module)
        self._registry: Any = HookRegistry.check_if_exists_or_initialize(module)
        self._register()

    def _register(self) -> None:
        self._registry.register_hook(self._hook, HOOK)
        self._forward = _Forward(self._module.forward, self._hook)
        self._module.forward = self._forward

    def ensure(self) -> None:
        """Register again if something removed the hook, as offloading does after each run."""
        if not self._in_chain():
            _forget(self._registry)
            self._register()

    def remove(self) -> None:
        """Remove the hook, whatever was put above or below it since."""
        below = self._hook.fn_ref.original_forward
        if not self._in_chain():
            _forget(self._registry)
        elif vars(self._module).get("_old_forward") is self._forward:  # accelerate sits above
            self._module._old_forward = below
            _forget(self._registry)
        else:
            self._remove_from_registry()
        self._tidy()

    def _remove_from_registry(self) -> None:
        place = self._registry._hook_order.index(HOOK)
        above = next(iter(self._registry._fn_refs[place + 1 :]), None)
        kept = None if above is None else above.forward
        self._registry.remove_hook(HOOK, recurse=False)
        if above is not None and above.original_forward is not None:
            # remove_hook overwrites the forward of a hook that brings its own: put it back.
            above.original_forward, above.forward = above.forward, kept

    def _in_chain(self) -> bool:
        forward: Any = self._module.forward
        while forward is not None:
            if forward is self._forward:
                return True
            forward = getattr(forward, "__wrapped__", None)
        return False

    def _tidy(self) -> None:
        if self._registry.hooks:
            return
        if not self._had_forward and "_hf_hook" not in vars(self._module):
            vars(self._module).pop("forward", None)
        if not self._had_registry:
            vars(self._module).pop("_diffusers_hook", None)


class ProgressBarWatcher:
    """Reports the end of a pipeline's loop: all pipelines put a progress bar around it."""

    def __init__(self, pipe: Pipeline, *, on_begin: Callable[[], Callable[[], None]]) -> None:
        """Watch the bars that ``pipe`` makes.

        Args:
            pipe: the pipeline; one without progress bars is left alone.
            on_begin: called when a bar is made; returns what to call when that bar is closed,
                which happens however its loop is left.
        """
        self._pipe: Any = pipe
        self._before: Any = vars(pipe).get("progress_bar")
        own: Any = getattr(type(pipe), "progress_bar", None)
        self._watching = callable(own)
        if not self._watching:
            return
        original: Any = self._before or MethodType(own, pipe)

        @functools.wraps(own)
        def progress_bar(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not pipe:  # a copy of the pipeline took the method along
                return own(self, *args, **kwargs)
            bar = original(*args, **kwargs)
            if not hasattr(bar, "close"):
                return bar
            on_close = on_begin()

            def end(*args: Any, **kwargs: Any) -> Any:
                vars(bar).pop("close", None)  # once, and the bar can be freed
                try:
                    on_close()
                finally:
                    result = bar.close(*args, **kwargs)
                return result

            bar.close = end
            return bar

        vars(pipe)["progress_bar"] = MethodType(progress_bar, pipe)

    def remove(self) -> None:
        """Stop watching."""
        if not self._watching:
            return
        vars(self._pipe).pop("progress_bar", None)
        if self._before is not None:
            vars(self._pipe)["progress_bar"] = self._before


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrapper, or the module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a network with the same weights that hooks can be registered on by itself."""
    twin = copy.copy(unwrap(module))
    # A registry of hooks belongs to one module; pipelines leave one behind after a call.
    vars(twin).pop("_diffusers_hook", None)
    return twin


def fresh_copy(scheduler: Scheduler) -> Any:
    """Return a copy of a scheduler with its sigmas, without history and without our methods."""
    twin = copy.deepcopy(scheduler)
    for name in ("step", "set_timesteps"):
        vars(twin).pop(name, None)
    forget_run(twin)
    return twin


def forget_run(scheduler: Scheduler) -> None:
    """Put a scheduler back to where ``set_timesteps`` left it, without history."""
    own = vars(scheduler)
    own.update({name: value for name, value in _FRESH.items() if name in own})
    if "model_outputs" in own:
        own["model_outputs"] = [None] * len(own["model_outputs"])
    if "derivatives" in own:  # of LMSDiscreteScheduler
        own["derivatives"] = []


def keeps_history(scheduler: Scheduler) -> bool:
    """Return whether the scheduler combines outputs of several steps (UniPC, DPM, DEIS)."""
    return hasattr(scheduler, "lower_order_nums")


def clear_history(scheduler: Scheduler) -> None:
    """Make the next step a first-order one, without a corrector."""
    for name in ("lower_order_nums", "last_sample"):
        if name in vars(scheduler):
            setattr(scheduler, name, _FRESH[name])


def begin_index(scheduler: Scheduler) -> int | None:
    """Return the step a run begins with, None if it was not set."""
    index: int | None = getattr(scheduler, "begin_index", None)
    return index


def set_step_index(scheduler: Scheduler, step: int | None) -> None:
    """Set the next step of a scheduler that counts its steps; None as before a run."""
    if hasattr(scheduler, "_step_index"):
        scheduler._step_index = step


def final_alpha(scheduler: Scheduler) -> float:
    """Return the cumulative alpha at which the last step of a DDIM scheduler ends."""
    return float(getattr(scheduler, "final_alpha_cumprod", 1.0))
