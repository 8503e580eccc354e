"""First Block Cache: the same bits as through diffusers' own call."""

from __future__ import annotations

import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.firstblock import FirstBlockCache
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.direct import directly


def test_same_bits_as_used_directly(subject: Subject) -> None:
    baseline = FirstBlockCache()
    for threshold in (0.2, 100.0):
        expected = directly(subject.name, lambda pipe, x=threshold: baseline.config(pipe, x, STEPS))
        with baseline.attach(subject.pipe, threshold, num_inference_steps=STEPS) as handle:
            assert torch.equal(subject.generate(), expected)
    calls = subject.branches
    # Under a huge threshold: all blocks on step 0, then the first one alone.
    computed = (BLOCKS + STEPS - 1) * calls
    assert handle.stats == BaselineStats("blocks", computed, STEPS * BLOCKS * calls - computed)
    assert torch.equal(subject.generate(), subject.full_run)
