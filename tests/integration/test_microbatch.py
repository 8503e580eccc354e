"""Micro-batches: the same results, fewer prompts per call of the network, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ertacache.integration.attach import Handle, attach
from ertacache.integration.identity import find_denoisers
from ertacache.integration.microbatch import MicroBatch
from ertacache.integration.tracker import Tracker
from tests.integration.setting import COMPUTED, STEPS, Observer, Setting, count_calls
from tests.integration.tiny import WORDS


@contextmanager
def micro_batches(pipe: Any, size: int, *, prompts: int) -> Iterator[None]:
    """Full runs in micro-batches."""
    tracker = Tracker(
        pipe,
        find_denoisers(pipe),
        start=lambda: Observer(STEPS),
        micro_batch=MicroBatch(size, prompts),
    )
    try:
        yield
    finally:
        tracker.remove()


def latents(setting: Setting, prompts: int) -> Tensor:
    words = [f"a {WORDS[1 + k % 2]} circle moving {WORDS[k % 9]}" for k in range(prompts)]
    noise = [torch.Generator().manual_seed(k) for k in range(prompts)]
    return setting.generate(prompt=words, generator=noise)


@pytest.mark.parametrize(("prompts", "size"), [(5, 2), (8, 3)])
def test_the_results_are_those_of_one_call(setting: Setting, prompts: int, size: int) -> None:
    """Eight prompts are as many as there are words in Flux's table of positions."""
    whole = latents(setting, prompts)
    with (
        micro_batches(setting.pipe, size, prompts=prompts),
        count_calls(setting.pipe.transformer) as calls,
    ):
        parts = latents(setting, prompts)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
    assert len(calls) == setting.branches * STEPS * -(-prompts // size)
    assert "forward" not in vars(setting.pipe.transformer)


def test_under_a_policy_reused_steps_stay_reused(setting: Setting) -> None:
    policy = setting.trajectory_policy()
    with attach(setting.pipe, policy):
        whole = latents(setting, 3)
    with (
        Handle(setting.pipe, policy, micro_batch=MicroBatch(1, prompts=3)) as handle,
        count_calls(setting.pipe.transformer) as calls,
    ):
        parts = latents(setting, 3)
        assert handle.stats.last.computed_steps == len(COMPUTED)
        assert handle.stats.last.denoiser_calls == setting.branches * len(COMPUTED)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
    assert len(calls) == setting.branches * 3 * len(COMPUTED)


def test_a_batch_that_fits_is_one_call(flux: Setting) -> None:
    whole = latents(flux, 3)
    for size in (3, 7):
        with (
            micro_batches(flux.pipe, size, prompts=3),
            count_calls(flux.pipe.transformer) as calls,
        ):
            assert torch.equal(latents(flux, 3), whole)
        assert len(calls) == STEPS


def test_it_is_gone_after_an_error(flux: Setting) -> None:
    with pytest.raises(TypeError), micro_batches(flux.pipe, 1, prompts=2):
        flux.pipe.transformer(hidden_states=torch.zeros(2, 64, 16), unknown=1)
    assert "forward" not in vars(flux.pipe.transformer)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        MicroBatch(0, 2)


class Nested(nn.Module):
    def forward(self, x: Tensor, more: dict[str, Any], flag: str = "") -> dict[str, Any]:
        assert len(more["rows"][0]) == len(x)
        assert len(more["txt_ids"]) == 4
        return {"sample": x + more["rows"][0], "note": flag, "pair": (x, [more["scale"] * x])}


def test_nested_arguments_and_results() -> None:
    network, x = Nested(), torch.arange(8.0).view(4, 2)
    more = {"rows": [x], "txt_ids": torch.zeros(4, 3), "scale": torch.tensor(3.0)}
    result = MicroBatch(1, 2).forward(network, network.forward, x, more, flag="kept")
    assert torch.equal(result["sample"], 2 * x)  # two rows per prompt, one prompt at a time
    assert result["note"] == "kept"
    assert torch.equal(result["pair"][1][0], 3 * x)
