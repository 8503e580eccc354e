"""Fewer steps: the same as calling the pipeline with fewer steps."""

from __future__ import annotations

import copy

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.fewer_steps import FewerSteps
from tests.baselines.cases import STEPS, Subject
from tests.integration.tiny import CASES, generate


def test_same_as_calling_with_fewer_steps(subject: Subject) -> None:
    expected = subject.generate(num_inference_steps=5)
    with FewerSteps().attach(subject.pipe, 5, num_inference_steps=STEPS) as handle:
        assert torch.equal(subject.generate(), expected)
    assert handle.stats == BaselineStats("steps", 5, 3)
    assert torch.equal(subject.generate(), subject.full_run)


def test_pipeline_without_metadata_or_cache() -> None:
    for name in ("sd3", "wan-experts"):
        pipe = CASES[name].build()
        expected = generate(pipe, CASES[name], num_inference_steps=3)
        with FewerSteps().attach(pipe, 3, num_inference_steps=STEPS):
            assert torch.equal(generate(pipe, CASES[name]), expected)


def test_what_cannot_be_shortened_is_refused(flux: Subject) -> None:
    with FewerSteps().attach(flux.pipe, 5, num_inference_steps=STEPS):
        with pytest.raises(ValueError, match="of 8 steps, but this one has 6"):
            flux.generate(num_inference_steps=6)
        with pytest.raises(ValueError, match="sigmas of its own"):
            flux.generate(sigmas=torch.linspace(1, 0.01, STEPS).tolist())
        with pytest.raises(RuntimeError, match="detach it first"):
            FewerSteps().attach(flux.pipe, 5, num_inference_steps=STEPS)
        twin = copy.deepcopy(flux.pipe.scheduler)
        twin.set_timesteps(STEPS)
        assert len(twin.timesteps) == STEPS
