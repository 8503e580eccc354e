"""First Block Cache: the same bits as through diffusers' own call."""

from __future__ import annotations

import torch

from ertacache.baselines import Stats
from ertacache.baselines.firstblock import FirstBlockCache
from tests.baselines.direct import directly
from tests.baselines.rivals import BLOCKS, STEPS, Subject


def test_same_bits_as_used_directly(subject: Subject) -> None:
    rival = FirstBlockCache()
    for threshold in (0.2, 100.0):
        expected = directly(subject.name, lambda pipe, x=threshold: rival.config(x))
        with rival.attach(subject.pipe, threshold, num_inference_steps=STEPS) as handle:
            assert torch.equal(subject.generate(), expected)
    calls = subject.branches
    # Under a huge threshold: all blocks on step 0, then the first one alone.
    computed = (BLOCKS + STEPS - 1) * calls
    assert handle.stats == Stats("blocks", computed, STEPS * BLOCKS * calls - computed)
    assert torch.equal(subject.generate(), subject.untouched)
