"""Caches of diffusers: enabled, kept apart by branch, started afresh, and removed completely."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers import TaylorSeerCacheConfig

from ertacache.baselines import BaselineHandle, NotApplicableError
from ertacache.baselines.diffusers_cache import why_no_block_cache, why_no_cache
from ertacache.baselines.firstblock import FirstBlockCache
from ertacache.baselines.taylorseer import TaylorSeer
from tests.baselines.cases import STEPS, Subject
from tests.integration.tiny import CASES


@dataclass(frozen=True)
class Configured(TaylorSeer):
    """TaylorSeer with any configuration."""

    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, pipe: Any, value: float, num_steps: int) -> TaylorSeerCacheConfig:
        return TaylorSeerCacheConfig(**self.settings)


def test_where_diffusers_offers_no_cache(sd3: Subject, flux: Subject) -> None:
    assert why_no_cache(sd3.pipe) == "diffusers offers no cache for SD3Transformer2DModel"
    assert why_no_block_cache(flux.pipe) is None
    experts = why_no_cache(CASES["wan-experts"].build())
    assert experts is not None
    assert "several networks" in experts


def attach_taylorseer(subject: Subject, **settings: Any) -> BaselineHandle:
    return Configured(settings=settings).attach(subject.pipe, STEPS, num_inference_steps=STEPS)


def test_identifiers_that_hook_nothing_are_noticed(wan: Subject, cogvideox: Subject) -> None:
    for subject in (wan, cogvideox):
        with pytest.raises(NotApplicableError, match="TaylorSeer hooks nothing in"):
            attach_taylorseer(subject)
        assert torch.equal(subject.generate(), subject.full_run)


def test_run_that_reuses_nothing_is_noticed(wan: Subject) -> None:
    with (
        attach_taylorseer(wan, use_lite_mode=True, disable_cache_before_step=STEPS),
        pytest.raises(RuntimeError, match="reused nothing in a whole run"),
    ):
        wan.generate()
    assert torch.equal(wan.generate(), wan.full_run)


def test_run_after_an_interrupted_one_is_right(subject: Subject) -> None:
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
    baseline = FirstBlockCache()
    with (
        baseline.attach(flux.pipe, 0.3, num_inference_steps=STEPS),
        pytest.raises((RuntimeError, ValueError), match="already"),
    ):
        baseline.attach(flux.pipe, 0.3, num_inference_steps=STEPS)
    assert torch.equal(flux.generate(), flux.full_run)
