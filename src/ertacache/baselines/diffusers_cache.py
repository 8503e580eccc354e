"""Baselines that diffusers implements, attached as every baseline is, and counted.

The cache is enabled through diffusers' public call with the method's own configuration. Added are a
fresh state for every run, also after an interrupted one, a state per guidance branch where
diffusers keeps one for all, and counters beneath the cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from ertacache.baselines.base import Baseline, BaselineHandle, NotApplicableError
from ertacache.baselines.clock import BaselineRun, Clock
from ertacache.baselines.private_api import (
    cached_tensors,
    enabled_cache,
    find_attention,
    find_blocks,
    find_hooks,
    has_cache,
    one_network,
    remember_hooks,
    reset_caches,
    tensors_within,
    why_no_blocks,
    why_not_listed,
    why_not_one_network,
)
from ertacache.integration.private_api import HookRegistration, ModelHook, Pipeline
from ertacache.integration.tracker import NetworkCall

__all__ = ["CacheRun", "DiffusersCache", "SplitCacheRun", "why_no_block_cache", "why_no_cache"]


def why_no_cache(pipe: Pipeline) -> str | None:
    """Return the reason if diffusers' caches cannot be enabled on a pipeline."""
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


class CacheRun(BaselineRun):
    """A run with a cache of diffusers, whose hooks start afresh.

    Attributes:
        network: the network with the cache.
        units: the modules that the method saves, counted.
    """

    def __init__(self, network: nn.Module, units: Sequence[nn.Module]) -> None:
        """Reset the caches within the network."""
        super().__init__()
        self.network, self.units = network, units
        reset_caches(network)

    def call(self, call: NetworkCall) -> Any:
        """Make the call; units that it does not compute are reused."""
        before = self.computed
        output = call.compute()
        self.reused += len(self.units) - (self.computed - before)
        return output

    def cached(self) -> Iterable[Any]:
        """Return what diffusers' hooks keep."""
        return cached_tensors(self.network)


class SplitCacheRun(CacheRun):
    """A run in which hooks have a state per guidance branch.

    Some caches of diffusers have one state per layer. With two calls of the network per step the
    second branch would be given what the first one left.
    """

    def __init__(self, network: nn.Module, units: Sequence[nn.Module], hook: str) -> None:
        """Split the states of the hooks of a name."""
        super().__init__(network, units)
        self._hooks = find_hooks(network, hook)
        self._states: dict[tuple[int, int], Any] = {}

    def call(self, call: NetworkCall) -> Any:
        """Give every hook the state of the present branch."""
        for index, hook in enumerate(self._hooks):
            key = (index, self.branch)
            if key not in self._states:
                self._states[key] = type(hook.state)()
            hook.state = self._states[key]
        return super().call(call)

    def cached(self) -> Iterable[Any]:
        """Return what the hooks keep of all branches."""
        return [*super().cached(), *tensors_within(self._states)]


@dataclass(frozen=True)
class DiffusersCache(Baseline):
    """A method that is a configuration of a cache of diffusers.

    Subclasses implement ``parameter`` and ``config``, and name the hook by which diffusers
    implements the method. If no such hook is registered, the method does not apply, however
    silently it was enabled.
    """

    hook: ClassVar[str] = ""
    unit: ClassVar[Literal["blocks", "attention layers"]] = "blocks"

    def applies(self, pipe: Pipeline) -> str | None:
        """It needs the blocks of a network on which diffusers offers caches."""
        return why_no_block_cache(pipe)

    @abstractmethod
    def config(self, pipe: Pipeline, value: float, num_steps: int) -> Any:
        """Return the configuration for diffusers' own call."""

    def enabled(self, pipe: Pipeline, config: Any) -> AbstractContextManager[None]:
        """Return the context within which the cache is enabled."""
        return enabled_cache(one_network(pipe), config)

    def make_run(self, pipe: Pipeline, units: Sequence[nn.Module], config: Any) -> CacheRun:
        """Return the run that starts; ``units`` are the modules that the method saves."""
        return CacheRun(one_network(pipe), units)

    def informed(self, pipe: Pipeline, clock: Clock[Any]) -> AbstractContextManager[None]:
        """Return a context that provides what the cache expects and pipelines do not provide."""
        return nullcontext()

    def _attach(self, pipe: Pipeline, value: float, num_steps: int) -> BaselineHandle:
        network = one_network(pipe)
        units = _find_units(network, self.unit)
        config = self.config(pipe, value, num_steps)
        with ExitStack() as undo:
            undo.callback(remember_hooks(network))
            for module in units:  # beneath the cache: only what is computed gets here
                undo.callback(HookRegistration(module, _CountHook(lambda: clock.run)).remove)
            undo.enter_context(self.enabled(pipe, config))
            if self.hook and not find_hooks(network, self.hook):
                raise NotApplicableError(f"{self.name} hooks nothing in {type(network).__name__}")
            clock = Clock(pipe, lambda: self.make_run(pipe, units, config), num_steps=num_steps)
            undo.callback(clock.remove)
            undo.enter_context(self.informed(pipe, clock))
            return BaselineHandle(undo.pop_all(), lambda: clock.stats(self.unit))


def _find_units(network: nn.Module, unit: str) -> list[nn.Module]:
    if unit == "attention layers":
        return find_attention(network)
    return [block.module for block in find_blocks(network)]


class _CountHook(ModelHook):
    def __init__(self, current_run: Callable[[], CacheRun | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current_run = current_run

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run = self._current_run()
        if run is not None:
            run.computed += 1
        return args, kwargs
