"""ProfilingDiT: roles of blocks, and which of them are replaced when."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.blocks import BlockCall, Decision
from ertacache.baselines.profilingdit import ProfilingDiT, decide, refresh_steps
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.toy import Double, ToyPipe, known_blocks


def test_lists_take_turns_between_refreshes() -> None:
    back, front = (range(0, 2),), (range(3, 4),)
    found = [
        decide(BlockCall(k, 0, Double(), {}), refresh=(1, 3, 5), lists=(back, front))
        for k in range(7)
    ]
    assert found == [
        Decision(),
        Decision(record=back),
        Decision(reuse=back),
        Decision(record=front),
        Decision(reuse=front),
        Decision(record=back),
        Decision(reuse=back),
    ]


def test_mental_arithmetic() -> None:
    pipe = ToyPipe()
    baseline = ProfilingDiT(foreground=(3, 1, 2, 0))
    with known_blocks(), baseline.attach(pipe, 2, num_inference_steps=17) as handle:
        assert refresh_steps(17) == (2, 6, 9, 11, 13, 14, 16)
        outputs = pipe([[1.0]] * 3 + [[10.0]] * 14)
    # Step 2 records the background, blocks 0 and 2: they add 1 and 4.
    assert outputs[:3] == [[16.0]] * 3
    assert outputs[3] == [((10.0 + 1) * 2 + 4) * 2]
    # Step 6 is full again and records the foreground, blocks 1 and 3, at 10: they add 20 and 80.
    assert outputs[6] == [160.0]
    assert outputs[7] == [(10.0 * 2 + 20) * 2 + 80]
    # Steps 0, 1 and seven refreshes in full, two blocks on the other eight.
    assert handle.stats == BaselineStats("blocks", 9 * 4 + 8 * 2, 8 * 2)


def test_roles_are_profiled(subject: Subject) -> None:
    baseline = ProfilingDiT().calibrate(subject.pipe, subject.runs)
    assert sorted(baseline.foreground) == list(range(BLOCKS))
    with baseline.attach(subject.pipe, 0, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)
    with baseline.attach(subject.pipe, 2, num_inference_steps=STEPS) as handle:
        assert not torch.equal(subject.generate(), subject.full_run)
    assert handle.stats.reused == 2 * subject.branches  # of 8 steps only step 2 is no refresh
    assert torch.equal(subject.generate(), subject.full_run)


def test_missing_calibration_raises(flux: Subject) -> None:
    with pytest.raises(ValueError, match="calibrate it first"):
        ProfilingDiT().attach(flux.pipe, 2, num_inference_steps=STEPS)
    with pytest.raises(ValueError, match="made no run"):
        ProfilingDiT().calibrate(flux.pipe, lambda: None)
