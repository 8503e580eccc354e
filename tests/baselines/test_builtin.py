"""Caches of diffusers: enabled, kept apart by branch, started afresh, and gone without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import TaylorSeerCacheConfig

from ertacache.baselines import NotApplicableError
from ertacache.baselines.builtin import (
    attach_cache,
    block_modules,
    enabled,
    why_no_block_cache,
    why_no_cache,
)
from ertacache.baselines.firstblock import FirstBlockCache
from tests.baselines.rivals import STEPS, Subject
from tests.integration.tiny import CASES


def test_where_diffusers_offers_no_cache(sd3: Subject, flux: Subject) -> None:
    assert why_no_cache(sd3.pipe) == "diffusers offers no cache for SD3Transformer2DModel"
    assert why_no_block_cache(flux.pipe) is None
    experts = why_no_cache(CASES["wan-experts"].build())
    assert experts is not None
    assert "several networks" in experts


def attach_taylorseer(subject: Subject, must_reuse: bool = False, **settings: Any) -> Any:
    return attach_cache(
        subject.pipe,
        enabled(subject.pipe, TaylorSeerCacheConfig(**settings)),
        name="TaylorSeer",
        num_inference_steps=STEPS,
        hook="taylorseer_cache",
        units=block_modules(subject.pipe),
        unit="blocks",
        must_reuse=must_reuse,
    )


def test_identifiers_that_hook_nothing_are_noticed(wan: Subject, cogvideox: Subject) -> None:
    for subject in (wan, cogvideox):
        with pytest.raises(NotApplicableError, match="TaylorSeer hooks nothing in"):
            attach_taylorseer(subject)
        assert torch.equal(subject.generate(), subject.untouched)


def test_run_that_reuses_nothing_is_noticed(wan: Subject) -> None:
    with (
        attach_taylorseer(wan, must_reuse=True, use_lite_mode=True, cache_interval=1),
        pytest.raises(RuntimeError, match="reused nothing in a whole run"),
    ):
        wan.generate()
    assert torch.equal(wan.generate(), wan.untouched)


def test_run_after_one_that_broke_off_is_right(subject: Subject) -> None:
    def stop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 3:
            raise KeyboardInterrupt
        return values

    with FirstBlockCache().attach(subject.pipe, 0.3, num_inference_steps=STEPS):
        expected = subject.generate()
        with pytest.raises(KeyboardInterrupt):
            subject.generate(callback_on_step_end=stop)
        assert torch.equal(subject.generate(), expected)


def test_two_caches_at_once_are_refused(flux: Subject) -> None:
    rival = FirstBlockCache()
    with (
        rival.attach(flux.pipe, 0.3, num_inference_steps=STEPS),
        pytest.raises((RuntimeError, ValueError), match="already"),
    ):
        rival.attach(flux.pipe, 0.3, num_inference_steps=STEPS)
    assert torch.equal(flux.generate(), flux.untouched)
