"""SeaCache: the same bits as through diffusers' own call, given the step by us."""

from __future__ import annotations

import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.seacache import SeaCache
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.direct import directly


def test_same_bits_as_used_directly(wan: Subject) -> None:
    baseline = SeaCache()
    for threshold in (0.5, 2.0):
        expected = directly("wan", lambda pipe, x=threshold: baseline.config(pipe, x, STEPS))
        with baseline.attach(wan.pipe, threshold, num_inference_steps=STEPS) as handle:
            assert torch.equal(wan.generate(), expected)
        assert handle.stats.reused > 0


def test_only_ends_are_computed_under_a_huge_threshold(subject: Subject) -> None:
    with SeaCache().attach(subject.pipe, 100.0, num_inference_steps=STEPS) as handle:
        assert not torch.equal(subject.generate(), subject.full_run)
    calls = BLOCKS * subject.branches
    assert handle.stats == BaselineStats("blocks", 2 * calls, (STEPS - 2) * calls)
    assert torch.equal(subject.generate(), subject.full_run)


def test_nothing_is_reused_under_a_tiny_threshold(subject: Subject) -> None:
    with SeaCache().attach(subject.pipe, 1e-4, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)


def test_latents_of_unknown_form_are_named(sd3: Subject) -> None:
    reason = SeaCache().applies(sd3.pipe)
    assert reason == "diffusers offers no cache for SD3Transformer2DModel"
