"""All uses of private diffusers and accelerate APIs of this layer: hooks, counters, histories.

Also what is read off Python's stack: the arguments of the pipeline's call.

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
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from diffusers.hooks import HookRegistry, ModelHook  # type: ignore[attr-defined]
from torch import Tensor, nn

__all__ = [
    "HOOK",
    "CallArgument",
    "CallEndWatcher",
    "DetachedHook",
    "HookRegistration",
    "ModelHook",
    "Pipeline",
    "ProgressBarWatcher",
    "Scheduler",
    "begin_index",
    "call_arguments",
    "check_free",
    "clear_history",
    "final_alpha",
    "find_hook",
    "forget_run",
    "fresh_copy",
    "in_call",
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


class _MethodPatch:
    """A method of one pipeline, replaced until ``remove``; copies behave like the class."""

    def __init__(
        self, pipe: Pipeline, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace a method, if the class has it, by what ``around`` makes of it."""
        self._own, self._name = vars(pipe), name
        self._before: Any = self._own.get(name)
        method: Any = getattr(type(pipe), name, None)
        self._patched = callable(method)
        if not self._patched:
            return
        replaced = around(self._before or MethodType(method, pipe))

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not pipe:  # a copy of the pipeline took the method along
                return method(self, *args, **kwargs)
            return replaced(*args, **kwargs)

        self._own[name] = MethodType(call, pipe)

    def remove(self) -> None:
        """Put back what was there."""
        if not self._patched:
            return
        self._own.pop(self._name, None)
        if self._before is not None:
            self._own[self._name] = self._before


class ProgressBarWatcher(_MethodPatch):
    """Reports the end of a pipeline's loop: all pipelines put a progress bar around it."""

    def __init__(self, pipe: Pipeline, *, on_begin: Callable[[], Callable[[], None]]) -> None:
        """Watch the bars that ``pipe`` makes.

        Args:
            pipe: the pipeline; one without progress bars is left alone.
            on_begin: called when a bar is made; returns what to call when that bar is closed,
                which happens however its loop is left.
        """

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def progress_bar(*args: Any, **kwargs: Any) -> Any:
                bar = original(*args, **kwargs)
                if hasattr(bar, "close"):
                    _watch_closing(bar, on_begin())
                return bar

            return progress_bar

        super().__init__(pipe, "progress_bar", around)


def _watch_closing(bar: Any, on_close: Callable[[], None]) -> None:
    def end(*args: Any, **kwargs: Any) -> Any:
        vars(bar).pop("close", None)  # once, and the bar can be freed
        try:
            on_close()
        finally:
            result = bar.close(*args, **kwargs)
        return result

    bar.close = end


class CallEndWatcher(_MethodPatch):
    """Reports the end of a pipeline's call: the last that all pipelines do is to free memory."""

    def __init__(self, pipe: Pipeline, *, on_end: Callable[[], None]) -> None:
        """Watch the calls of ``pipe``; those that fail have no such end.

        Args:
            pipe: the pipeline; one that is not of diffusers is left alone.
            on_end: called at the end of every call.
        """

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def maybe_free_model_hooks(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                on_end()
                return result

            return maybe_free_model_hooks

        super().__init__(pipe, "maybe_free_model_hooks", around)


class CallArgument(NamedTuple):
    """An argument of a pipeline's call.

    Attributes:
        value: what it has now.
        default: what it has if it is not given; None also if it has no default.
    """

    value: Any
    default: Any


# Called within a run, which may be compiled around it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def call_arguments(pipe: Pipeline) -> dict[str, CallArgument]:
    """The arguments of the call of a pipeline that is under way, by name; empty without one.

    Where a class calls the one that it is derived from, those of both, the inner ones first.

    Read off the stack: of its guidance a pipeline keeps at most ``guidance_scale`` in a property,
    ``__call__`` is looked up on the class, so that none of an instance can be put in its place,
    and a pipeline of one's own may have no property at all.
    """
    arguments: dict[str, CallArgument] = {}
    for code, found in _calls(pipe, sys._getframe(1)):
        arguments = _arguments(code, found) | arguments
    return arguments


def in_call(pipe: Pipeline) -> bool:
    """Return whether a call of a pipeline is under way in this thread."""
    return next(_calls(pipe, sys._getframe(1)), None) is not None


def _calls(pipe: Pipeline, frame: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The calls of a pipeline on the stack with their variables, the innermost first.

    A pipeline may be wrapped in an object that calls it: what has the same scheduler is the same.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__call__" and code.co_argcount > 0:
            found = _variables(frame)
            caller = found.get(code.co_varnames[0])
            own = getattr(caller, "__dict__", {})
            if caller is pipe or own.get("scheduler") is pipe.scheduler:
                yield code, found
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame.

    Before Python 3.13 a frame keeps the dictionary until it is left, and so would every latent of
    this moment be kept: it is emptied. Python fills it again when it is used.
    """
    kept = frame.f_locals
    found = dict(kept)
    if isinstance(kept, dict):
        kept.clear()
    return found


def _arguments(code: CodeType, found: Mapping[str, Any]) -> dict[str, CallArgument]:
    """The arguments among the variables of a call, also those that it takes as ``**kwargs``."""
    count = code.co_argcount + code.co_kwonlyargcount
    given = {name: found[name] for name in code.co_varnames[1:count] if name in found}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        place = count + bool(code.co_flags & inspect.CO_VARARGS)
        given |= found.get(code.co_varnames[place], {})
    caller = type(found[code.co_varnames[0]])
    calls = (vars(kind).get("__call__") for kind in caller.__mro__)
    plain = (inspect.unwrap(call) for call in calls if call is not None)
    own = next((call for call in plain if getattr(call, "__code__", None) is code), None)
    known = {} if own is None else dict(inspect.signature(own).parameters)
    defaults = {name: p.default for name, p in known.items() if p.default is not p.empty}
    return {name: CallArgument(value, defaults.get(name)) for name, value in given.items()}


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
