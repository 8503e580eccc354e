"""The uses of private APIs, one by one; how they bear offloading and hooks is in coexistence."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ertacache.integration.private_api import (
    HOOK,
    CallEndWatcher,
    DetachedHook,
    HookRegistration,
    ModelHook,
    ProgressBarWatcher,
    begin_index,
    call_arguments,
    check_free,
    clear_history,
    final_alpha,
    find_hook,
    fresh_copy,
    in_call,
    keeps_history,
    set_step_index,
    unwrap,
)
from tests.integration.sampling import DETERMINISTIC, STEPS, Field, Sampling, make
from tests.integration.setting import Setting


class Negating(ModelHook):
    """A hook whose presence is seen in the output; copies of a module do not take it along."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return -self.fn_ref.original_forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return DetachedHook()


INPUT = (torch.ones(2, 3, 4), torch.tensor(0.0))


def test_hook_is_registered_once_and_removed_without_a_trace() -> None:
    network = Field()
    before, expected = set(vars(network)), network(*INPUT)
    hook = Negating()
    registration = HookRegistration(network, hook)
    assert find_hook(network) is hook
    assert torch.equal(network(*INPUT), -expected)
    with pytest.raises(RuntimeError, match="already attached to this Field: call ertacache"):
        HookRegistration(network, Negating())
    registration.remove()
    assert set(vars(network)) == before
    assert find_hook(network) is None
    assert torch.equal(network(*INPUT), expected)


def test_copy_of_a_hooked_module_is_free() -> None:
    network = Field()
    expected = network(*INPUT)
    registration = HookRegistration(network, Negating())
    twin = copy.deepcopy(network)
    assert find_hook(twin) is None
    assert torch.equal(twin(*INPUT), expected)
    assert HOOK in twin._diffusers_hook.hooks  # its place is there until it is checked
    check_free(twin)
    assert HOOK not in twin._diffusers_hook.hooks
    HookRegistration(twin, Negating()).remove()
    assert torch.equal(twin(*INPUT), expected)
    registration.remove()


def test_hook_that_was_removed_by_others_is_registered_again() -> None:
    """As offloading does, which puts the forward back that it found."""
    network = Field()
    expected = network(*INPUT)
    registration = HookRegistration(network, Negating())
    del network.forward
    assert torch.equal(network(*INPUT), expected)
    registration.ensure()
    assert torch.equal(network(*INPUT), -expected)
    registration.ensure()  # it is there
    assert torch.equal(network(*INPUT), -expected)
    registration.remove()
    assert torch.equal(network(*INPUT), expected)


def test_progress_bars_are_watched_until_removed(flux: Setting) -> None:
    """However a loop is left, each bar reports once, and is closed."""
    pipe, events = flux.pipe, list[str]()

    def begin() -> Any:
        events.append("begin")
        return lambda: events.append("close")

    watcher = ProgressBarWatcher(pipe, on_begin=begin)
    with pytest.raises(KeyboardInterrupt), pipe.progress_bar(total=2):
        raise KeyboardInterrupt
    assert events == ["begin", "close"]
    bar = pipe.progress_bar(total=2)
    bar.close()
    bar.close()
    assert events == 2 * ["begin", "close"]
    watcher.remove()
    with pipe.progress_bar(total=2):
        pass
    assert events == 2 * ["begin", "close"]
    assert "progress_bar" not in vars(pipe)


def test_progress_bar_of_the_instance_comes_back(flux: Setting) -> None:
    pipe, own = flux.pipe, flux.pipe.progress_bar
    pipe.progress_bar = mine = lambda *args, **kwargs: own(*args, **kwargs)
    watcher = ProgressBarWatcher(pipe, on_begin=lambda: lambda: None)
    assert pipe.progress_bar is not mine
    watcher.remove()
    assert vars(pipe).pop("progress_bar") is mine


def test_pipeline_without_progress_bar_is_left_alone() -> None:
    sampling = Sampling(make("DDIMScheduler"))
    before = set(vars(sampling))
    ProgressBarWatcher(sampling, on_begin=lambda: lambda: None).remove()
    assert set(vars(sampling)) == before


def test_wrapper_of_a_compiled_module() -> None:
    network = Field()
    assert unwrap(torch.compile(network, backend="eager")) is network  # type: ignore[arg-type]
    assert unwrap(network) is network


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("name", list(DETERMINISTIC))
def test_state_of_schedulers(name: str) -> None:
    """A copy without history begins anew; the run of the original is not touched."""
    sampling = Sampling(make(name))
    expected = sampling()
    scheduler = sampling.scheduler
    assert keeps_history(scheduler) == ("Multistep" in name)
    twin = fresh_copy(scheduler)
    assert getattr(twin, "step_index", None) is None
    assert getattr(twin, "lower_order_nums", 0) == 0
    assert getattr(scheduler, "step_index", STEPS) == STEPS
    assert torch.equal(twin.timesteps, scheduler.timesteps)
    set_step_index(scheduler, 3)
    assert getattr(scheduler, "step_index", 3) == 3
    clear_history(scheduler)
    assert getattr(scheduler, "lower_order_nums", 0) == 0
    assert getattr(scheduler, "last_sample", None) is None
    assert torch.equal(sampling(), expected)


def test_begin_index_and_final_alpha() -> None:
    flow, ddim = make("FlowMatchEulerDiscreteScheduler"), make("DDIMScheduler")
    assert begin_index(flow) is None
    flow.set_begin_index(2)
    assert begin_index(flow) == 2
    assert begin_index(ddim) is None  # it has none
    assert final_alpha(ddim) == float(ddim.alphas_cumprod[0])  # set_alpha_to_one is off
    assert final_alpha(flow) == 1.0


class Holder:
    """Something whose end can be seen."""


class Calling:
    """A pipeline that asks for its arguments, and drops one of its variables afterwards."""

    def __init__(self, scheduler: object = None) -> None:
        self.scheduler = scheduler or object()

    def __call__(self, first: int, *rest: int, scale: float = 2.0, **more: Any) -> Any:
        kept = Holder()
        seen = weakref.ref(kept)
        found = call_arguments(more.pop("read", self))
        assert in_call(self)
        del kept
        return found, seen()


class Wrapping(Calling):
    def __call__(self, **more: Any) -> Any:  # type: ignore[override]
        return super().__call__(1, scale=4.0, **more)


class Wrapped:
    """An object around a pipeline."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    @property
    def scheduler(self) -> Any:
        return self._pipe.scheduler

    def __call__(self, **call: Any) -> Any:
        return self._pipe(1, read=self, **call)


def test_the_arguments_of_a_call() -> None:
    """Of this pipeline and no other, its innermost call first, with defaults; nothing is kept."""
    pipe = Calling()
    found, kept = pipe(1, 2, 3, style="x")
    assert found == {"first": (1, None), "scale": (2.0, 2.0), "style": ("x", None)}
    assert kept is None
    found, _ = Wrapping()(other=5)
    assert found == {"first": (1, None), "scale": (4.0, 2.0), "other": (5, None)}
    assert call_arguments(pipe) == {}
    assert not in_call(pipe)
    found, _ = pipe(1, read=Calling())
    assert found == {}
    found, _ = Wrapped(pipe)(style="x")
    assert found == {"first": (1, None), "scale": (2.0, 2.0), "style": ("x", None)}


def test_the_end_of_a_call_is_watched_until_removed(flux: Setting) -> None:
    ends: list[int] = []
    watcher = CallEndWatcher(flux.pipe, on_end=lambda: ends.append(1))
    flux.generate()
    assert ends == [1]
    twin = copy.deepcopy(flux.pipe)
    twin.maybe_free_model_hooks()  # not of the pipeline that is watched
    assert ends == [1]
    watcher.remove()
    flux.pipe.maybe_free_model_hooks()
    assert ends == [1]
    assert "maybe_free_model_hooks" not in vars(flux.pipe)
    CallEndWatcher(Sampling(make("DDIMScheduler")), on_end=lambda: None).remove()
