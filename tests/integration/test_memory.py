"""What the cache holds, step by step, and that it does not grow from run to run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.integration.attach import Handle, attach
from tests.integration.setting import METHODS, Setting, make_setting

HISTORY = {"trajectory": 3, "paper": 1}
GENERATIONS = 200


@pytest.fixture(scope="module")
def frozen(flux: Setting) -> Iterator[None]:
    """Only objects that are made from now on are looked at: the others are a million."""
    flux.generate()  # whatever is made once is there
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def attach_method(setting: Setting, method: str) -> Handle:
    policy, _ = setting.policy_of(method)
    return attach(setting.pipe, policy)


def watch_bytes(setting: Setting, handle: Handle) -> list[int]:
    """The most that was held until the end of each step of a run, the last one left out."""
    held: list[int] = []

    def look(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        held.append(handle.stats.last.cached_bytes)
        return values

    setting.generate(callback_on_step_end=look)
    return held


@pytest.mark.parametrize("method", METHODS)
def test_cache_holds_history_and_two_latents(setting: Setting, method: str) -> None:
    """History, and the outputs with and without the prompt: in one call, or in two (Wan)."""
    latent = setting.run.latents[0].nbytes
    with attach_method(setting, method) as handle:
        held = watch_bytes(setting, handle)
    assert len(held) == setting.run.num_steps
    assert latent <= held[0] <= held[-1] <= (HISTORY[method] + 2) * latent
    assert handle.stats.last.cached_bytes == held[-1]


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("method", METHODS)
def test_an_attached_run_needs_no_more_than_that(flux: Setting, method: str) -> None:
    """Counted from outside, guided in two calls: what lives on top of the full run."""
    latent = flux.run.latents[0].nbytes
    plain = most_live_bytes(flux)
    with attach_method(flux, method) as handle:
        attached = most_live_bytes(flux)
        held = handle.stats.last.cached_bytes
    assert held == (HISTORY[method] + 2) * latent
    # The outputs for the last prompt pair live in the full run as well.
    assert latent <= attached - plain <= held


def most_live_bytes(setting: Setting) -> int:
    """The most memory of tensors at the end of a step, on top of what is there before the run."""
    guided = {"true_cfg_scale": 2.0, "negative_prompt": "black"}
    setting.generate(**guided)  # whatever is made once is there
    gc.collect()
    before, during = live_bytes(), list[int]()

    def look(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        during.append(live_bytes() - before)
        return values

    gc.disable()
    setting.generate(**guided, callback_on_step_end=look)
    gc.enable()
    gc.collect()
    assert live_bytes() == before
    return max(during)


def live_bytes() -> int:
    """Memory of all living tensors, shared memory counted once."""
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(value), Tensor) for value in gc.get_objects())


@pytest.mark.usefixtures("frozen")
def test_two_hundred_generations_do_not_grow() -> None:
    short = make_setting("flux", num_inference_steps=4)
    embeddings = short.pipe.encode_prompt("a red circle", None, max_sequence_length=8)
    given = {"prompt": None, "prompt_embeds": embeddings[0], "pooled_prompt_embeds": embeddings[1]}
    with attach(short.pipe, short.trajectory_policy((0, 2))) as handle:
        short.generate(**given)
        first, tensors = handle.stats, live_tensors()
        for seed in range(1, GENERATIONS):
            short.generate(seed=seed, **given)
            assert handle.stats.total.cached_bytes == first.last.cached_bytes
            if seed in (GENERATIONS // 2, GENERATIONS - 1):
                assert live_tensors() == tensors
    assert handle.stats.runs == GENERATIONS
    assert handle.stats.total.computed_steps == 2 * GENERATIONS


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("method", METHODS)
def test_attaching_again_and_again_does_not_grow(flux: Setting, method: str) -> None:
    counts = []
    for _ in range(3):
        with attach_method(flux, method):
            flux.generate()
        counts.append(live_tensors())
    assert counts[1] == counts[2]
    assert torch.equal(flux.generate(), flux.run.latents[-1])
