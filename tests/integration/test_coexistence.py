"""Hooks of others, offloading and compilation: attached beside them, and gone without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import accelerate.hooks
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn

from ertacache.integration.attach import attach
from tests.integration.setting import COMPUTED, STEPS, Setting
from tests.integration.tiny import CASES, generate


class Doubling(ModelHook):  # type: ignore[misc]
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (2 * self.fn_ref.original_forward(*args, **kwargs)[0],)


@pytest.mark.parametrize("above", [True, False])
def test_hooks_of_others_survive(flux: Setting, above: bool) -> None:
    """A hook that was there first, or came later, stays in place after ours is gone."""
    pipe, policy = flux.another().pipe, flux.trajectory_policy()
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
        assert not torch.equal(generate(pipe, flux.case), flux.run.latents[-1])
    else:
        assert torch.equal(generate(pipe, flux.case), doubled)
    registry.remove_hook("doubling")
    assert torch.equal(generate(pipe, flux.case), flux.run.latents[-1])


class Offload(accelerate.hooks.ModelHook):  # type: ignore[misc]
    """Takes the place of moving the weights: only that it was called matters."""

    calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("offload_first", [True, False])
def test_offloading_between_runs(flux: Setting, offload_first: bool) -> None:
    """After each run pipelines take accelerate's hooks away and put them back."""
    pipe, policy = flux.another().pipe, flux.trajectory_policy()
    expected = flux.attached
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


def offload(pipe: Any, kind: str) -> None:
    """Without an accelerator weights move from the CPU to the CPU, through the same hooks."""
    device = torch.device("cpu")
    if kind == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif kind == "sequential":
        original = accelerate.cpu_offload

        def unnumbered(module: Any, _: torch.device, **options: Any) -> Any:
            return original(module, device, **options)

        # The pipeline passes "cpu:0", from which accelerate cannot bring weights back.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accelerate, "cpu_offload", unnumbered)
            pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.enable_group_offload(device, offload_type=kind, num_blocks_per_group=1)


@pytest.mark.parametrize("kind", ["model", "sequential", "block_level", "leaf_level"])
@pytest.mark.parametrize("offload_first", [True, False])
def test_offloading_by_the_pipeline(flux: Setting, kind: str, offload_first: bool) -> None:
    """Before or after attach, run after run, and still there when the policy is gone."""
    pipe, policy = flux.another().pipe, flux.trajectory_policy()
    expected = flux.attached
    if offload_first:
        offload(pipe, kind)
    with attach(pipe, policy) as handle:
        if not offload_first:
            offload(pipe, kind)
        for _ in range(2):
            assert torch.equal(generate(pipe, flux.case), expected)
        assert handle.stats.total.computed_steps == 2 * len(COMPUTED)
    for _ in range(2):
        assert torch.equal(generate(pipe, flux.case), flux.run.latents[-1])
    network = pipe.transformer
    kept = {"model": "_hf_hook", "sequential": "_hf_hook"}.get(kind, "_diffusers_hook")
    assert hasattr(network, kept)
    if kind == "sequential":
        assert {weight.device.type for weight in network.parameters()} == {"meta"}


class CountingBackend:
    """Runs graphs as they are, and counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compile_network(pipe: Any, how: str, backend: Any) -> None:
    if how == "module":
        pipe.transformer.compile(backend=backend)
    elif how == "wrapper":
        pipe.transformer = torch.compile(pipe.transformer, backend=backend)
    else:
        pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)


@pytest.mark.filterwarnings("error")  # such as those of code of ours that cannot be compiled
@pytest.mark.parametrize(
    ("how", "compile_first"),
    # The wrapper replaces the network, so it comes first.
    [("module", True), ("module", False), ("wrapper", True), ("blocks", True), ("blocks", False)],
)
def test_nothing_is_compiled_again(flux: Setting, how: str, compile_first: bool) -> None:
    """One run compiles; its reused steps, more runs and other seeds add nothing.

    The network stays compiled under the hook, and the steps are the plan's.
    """
    pipe, backend = flux.another().pipe, CountingBackend()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    if compile_first:
        compile_network(pipe, how, backend)
    with attach(pipe, flux.trajectory_policy()) as handle:
        if not compile_first:
            compile_network(pipe, how, backend)
        graphs, runs = [], []
        for seed in range(3):
            result = generate(pipe, flux.case, seed=seed)
            if seed == 0:
                torch.testing.assert_close(result, flux.attached, rtol=1e-4, atol=1e-4)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            runs.append(backend.runs)
        assert handle.stats.total.computed_steps == 3 * len(COMPUTED)
    torch.compiler.reset()
    assert graphs[0] > 0
    assert graphs == 3 * graphs[:1]
    assert runs[0] >= len(COMPUTED)
    assert runs == [runs[0], 2 * runs[0], 3 * runs[0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["module", "wrapper"])
def test_what_is_solved_within_a_call_is_not_compiled(flux: Setting, how: str) -> None:
    """Plans are chosen at the first call of the network, which is a compiled one.

    No more graphs than with a plan that is there already.
    """
    plain, policy = flux.another(), flux.policy(profile=flux.profile())
    pipe, backend = flux.another().pipe, CountingBackend()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_network(pipe, how, backend)
    with attach(pipe, flux.trajectory_policy()):
        generate(pipe, flux.case)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with attach(pipe, policy, speedup=2.0), attach(plain.pipe, policy, speedup=2.0) as handle:
        for num_steps in (8, 6):
            results = [
                generate(each, flux.case, num_inference_steps=num_steps)
                for each in (pipe, plain.pipe)
            ]
            torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
            assert handle.stats.last.computed_steps == num_steps // 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    torch.compiler.reset()


@pytest.mark.parametrize("when", ["before", "after", "within"])
def test_attention_backends(flux: Setting, when: str) -> None:
    pipe, policy = flux.another().pipe, flux.trajectory_policy()
    expected = flux.attached
    if when == "before":
        pipe.transformer.set_attention_backend("_native_math")
    with attach(pipe, policy) as handle:
        if when == "after":
            pipe.transformer.set_attention_backend("_native_math")
        if when == "within":
            with attention_backend("_native_math"):
                result = generate(pipe, flux.case)
        else:
            result = generate(pipe, flux.case)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    assert handle.stats.last.computed_steps == len(COMPUTED)
    pipe.transformer.set_attention_backend("native")  # also for the rest of the process
    assert torch.equal(generate(pipe, flux.case), flux.run.latents[-1])


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LoRA for the tiny Flux, its weights at random."""
    torch.manual_seed(5)
    pipe, folder = CASES["flux"].build(), tmp_path_factory.mktemp("lora")
    layers = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.transformer.add_adapter(layers)
    pipe.save_lora_weights(folder, get_peft_model_state_dict(pipe.transformer))
    return folder


def test_loras_come_and_go(flux: Setting, lora: Path) -> None:
    """Loaded before or after attach it is the same; unloaded, the results are as before."""
    pipe, policy = flux.another().pipe, flux.trajectory_policy()
    pipe.load_lora_weights(lora)
    full = generate(pipe, flux.case)
    with attach(pipe, policy) as handle:
        adapted = generate(pipe, flux.case)
        pipe.unload_lora_weights()
        plain = generate(pipe, flux.case)
        pipe.load_lora_weights(lora)
        assert torch.equal(generate(pipe, flux.case), adapted)
        assert handle.stats.total.computed_steps == 3 * len(COMPUTED)
    assert torch.equal(generate(pipe, flux.case), full)
    assert torch.equal(flux.attached, plain)
    assert not torch.equal(adapted, plain)
