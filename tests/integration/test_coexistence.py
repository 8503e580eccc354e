"""Hooks of others, offloading and compilation: attached beside them, and gone without a trace."""

from __future__ import annotations

from typing import Any

import accelerate.hooks
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from ertacache.integration import attach
from tests.integration.setting import COMPUTED, STEPS, Setting
from tests.integration.tiny import CASES, generate


class Doubling(ModelHook):  # type: ignore[misc]
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (2 * self.fn_ref.original_forward(*args, **kwargs)[0],)


@pytest.mark.parametrize("above", [True, False])
def test_hooks_of_others_survive(flux: Setting, above: bool) -> None:
    """A hook that was there first, or came later, stays in place after ours is gone."""
    pipe, policy = CASES["flux"].build(), flux.trajectory_policy()
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    if not above:
        registry.register_hook(Doubling(), "doubling")
        doubled = generate(pipe, flux.case)
    with attach(pipe, policy) as handle:
        if above:
            registry = pipe.transformer._diffusers_hook
            registry.register_hook(Doubling(), "doubling")
        generate(pipe, flux.case)
        assert handle.stats.last.computed_steps == len(COMPUTED)
    if above:
        doubled = generate(CASES["flux"].build(), flux.case)
        assert not torch.equal(generate(pipe, flux.case), doubled)
    else:
        assert torch.equal(generate(pipe, flux.case), doubled)
    registry.remove_hook("doubling")
    assert torch.equal(generate(pipe, flux.case), flux.run.latents[-1])


class Offload(accelerate.hooks.ModelHook):  # type: ignore[misc]
    """Stands for moving the weights: only that it was called matters."""

    calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("offload_first", [True, False])
def test_offloading_between_runs(flux: Setting, offload_first: bool) -> None:
    """After each run pipelines take accelerate's hooks away and put them back."""
    pipe, policy = CASES["flux"].build(), flux.trajectory_policy()
    with attach(flux.pipe, policy):
        expected = flux.generate()
    network, hook = pipe.transformer, Offload()
    if offload_first:
        accelerate.hooks.add_hook_to_module(network, hook)
    handle = attach(pipe, policy)
    if not offload_first:
        accelerate.hooks.add_hook_to_module(network, hook)
    for _ in range(2):
        assert torch.equal(generate(pipe, flux.case), expected)
        accelerate.hooks.remove_hook_from_module(network)
        accelerate.hooks.add_hook_to_module(network, hook)
    assert handle.stats.total.computed_steps == 2 * len(COMPUTED)
    handle.detach()
    before = hook.calls
    assert torch.equal(generate(pipe, flux.case), flux.run.latents[-1])
    assert hook.calls == before + STEPS  # offloading still works
    accelerate.hooks.remove_hook_from_module(network)
    assert torch.equal(generate(pipe, flux.case), flux.run.latents[-1])
    assert network.forward.__func__ is type(network).forward  # nothing of ours is underneath


@pytest.mark.parametrize("how", ["module", "wrapper", "blocks"])
def test_compiled_network(flux: Setting, how: str) -> None:
    """The network stays compiled under the hook, and the steps are the plan's."""
    pipe, policy = CASES["flux"].build(), flux.trajectory_policy()
    with attach(flux.pipe, policy):
        expected = flux.generate()
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    if how == "module":
        pipe.transformer.compile(backend=backend)
    elif how == "wrapper":
        pipe.transformer = torch.compile(pipe.transformer, backend=backend)
    else:
        pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)
    with attach(pipe, policy) as handle:
        torch.testing.assert_close(generate(pipe, flux.case), expected, rtol=1e-4, atol=1e-4)
    assert handle.stats.last.computed_steps == len(COMPUTED)
    assert len(ran) >= len(COMPUTED)
    torch.compiler.reset()
