"""Attach a cache of diffusers the way every rival is attached, and count what it saves.

The cache is enabled through diffusers' public call with the method's own configuration. Added are a
fresh state for every run, also after one that broke off, a state per guidance branch where
diffusers keeps one for all, and counters beneath the cache. Knows no method's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ertacache.baselines.clock import Clock
from ertacache.baselines.compat import (
    cached_tensors,
    find_blocks,
    has_cache,
    hooked,
    one_network,
    remember_hooks,
    reset_caches,
    tensors_within,
    why_no_blocks,
    why_not_listed,
    why_not_one_network,
)
from ertacache.baselines.interface import Handle, NotApplicableError, Stats
from ertacache.integration.compat import HookSeat, ModelHook, Pipeline

__all__ = [
    "attach_cache",
    "block_modules",
    "enabled",
    "states_per_branch",
    "why_no_block_cache",
    "why_no_cache",
]


def why_no_cache(pipe: Pipeline) -> str | None:
    """Say why diffusers' caches cannot be enabled on a pipeline, if they cannot."""
    several = why_not_one_network(pipe)
    if several is not None:
        return several
    network = one_network(pipe)
    if not has_cache(network):
        return f"diffusers offers no cache for {type(network).__name__}"
    return None


def why_no_block_cache(pipe: Pipeline) -> str | None:
    """The same for caches that need to know the blocks."""
    return why_no_cache(pipe) or why_no_blocks(pipe) or why_not_listed(one_network(pipe))


def block_modules(pipe: Pipeline) -> list[nn.Module]:
    """Return the blocks of a pipeline's network."""
    return [block.module for block in find_blocks(one_network(pipe))]


def attach_cache(
    pipe: Pipeline,
    cache: AbstractContextManager[None],
    *,
    name: str,
    num_inference_steps: int,
    hook: str | None = None,
    units: Sequence[nn.Module],
    unit: str,
    prepare: Callable[[nn.Module, Clock, ExitStack], None] | None = None,
    held: Callable[[], Iterable[Tensor]] | None = None,
    must_reuse: bool = False,
) -> Handle:
    """Enable a cache that the network or its library brings, until the handle is detached.

    Args:
        pipe: the pipeline.
        cache: enables the cache when entered, as ``enabled`` does, and disables it on exit.
        name: the method, for messages.
        num_inference_steps: steps of every run.
        hook: the name of a hook that the method registers; if it is nowhere, the method does not
            apply, however quietly it was enabled.
        units: the modules that the method saves, counted.
        unit: what they are called.
        prepare: does what else the method needs, once the cache is enabled; undone by the stack.
        held: the tensors that the method keeps; None looks into diffusers' hooks.
        must_reuse: raise at the end of a run in which nothing was reused.
    """
    network = one_network(pipe)
    counter = _Counter()
    with ExitStack() as undo:
        undo.callback(remember_hooks(network))
        for module in units:
            undo.callback(HookSeat(module, _CountHook(counter)).remove)
        undo.enter_context(cache)
        if hook is not None and not hooked(network, hook):
            raise NotApplicableError(f"{name} hooks nothing in {type(network).__name__}")
        clock = Clock(pipe, num_steps=num_inference_steps)
        undo.callback(clock.remove)
        counter.clock = clock
        clock.weigh(lambda: held() if held is not None else cached_tensors(network))
        clock.at_start(lambda: reset_caches(network))
        if prepare is not None:
            prepare(network, clock, undo)

        def stats() -> Stats:
            reused = clock.calls * len(units) - counter.computed
            return Stats(unit, counter.computed, reused, clock.cached_bytes)

        def check() -> None:
            if stats().reused == 0:
                raise RuntimeError(f"{name} reused nothing in a whole run")

        if must_reuse:
            clock.at_end(check)
        kept = undo.pop_all()
    return Handle(kept, stats)


@contextmanager
def enabled(pipe: Pipeline, config: Any) -> Iterator[None]:
    """Enable a cache of diffusers on a pipeline's network for a while, and leave no trace."""
    network: Any = one_network(pipe)
    fresh = "_cache_config" not in vars(network)
    network.enable_cache(config)
    try:
        yield
    finally:
        network.disable_cache()
        if fresh:
            vars(network).pop("_cache_config", None)


def states_per_branch(hook: str) -> Callable[[nn.Module, Clock, ExitStack], None]:
    """Keep the states of hooks apart by guidance branch, for ``attach_cache``.

    Some caches of diffusers have one state per layer. With two calls of the network per step the
    second branch would be given what the first one left.
    """

    def prepare(network: nn.Module, clock: Clock, undo: ExitStack) -> None:
        hooks = hooked(network, hook)
        states: dict[tuple[int, int], Any] = {}

        def choose(branch: int) -> None:
            for index, one in enumerate(hooks):
                key = (index, branch)
                if key not in states:
                    states[key] = type(one.state)()
                one.state = states[key]

        clock.at_start(states.clear)
        clock.at_call(choose)
        clock.weigh(lambda: tensors_within(states))
        undo.callback(states.clear)

    return prepare


class _Counter:
    """Calls that reached the layers themselves within runs."""

    def __init__(self) -> None:
        self.computed = 0
        self.clock: Clock | None = None

    def count(self) -> None:
        if self.clock is not None and self.clock.step is not None:
            self.computed += 1


class _CountHook(ModelHook):
    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._counter.count()
        return args, kwargs
