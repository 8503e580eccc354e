"""The paper's method on features: the compute schedule, and what a reused step returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.paper_features import PaperFeatures, _distances
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.toy import ToyPipe, known_blocks


@pytest.fixture
def toy() -> Iterator[ToyPipe]:
    with known_blocks():
        yield ToyPipe()


def test_reused_steps_add_the_last_residual(toy: ToyPipe) -> None:
    baseline = PaperFeatures(schedules=((0.1, (0, 2)),))
    with baseline.attach(toy, 2, num_inference_steps=4) as handle:
        # The stack adds 15 x: 15 on step 1, 45 on step 3.
        assert toy([[1.0], [2.0], [3.0], [4.0]]) == [[16.0], [17.0], [48.0], [49.0]]
    assert handle.stats == BaselineStats("blocks", 8, 8)


def test_schedule_of_a_known_sequence(toy: ToyPipe) -> None:
    # Residuals 15 (1, 2, 2, 2, 10): steps 2 and 3 cost nothing, step 1 costs a half of its norm.
    rows = [[1.0], [2.0], [2.0], [2.0], [10.0]]
    baseline = PaperFeatures().calibrate(toy, lambda: toy(rows))
    assert sorted(set(dict(baseline.schedules).values())) == [(0, 1, 2, 3, 4), (0, 1, 4), (0, 4)]
    for budget, computed in ((5, 5), (4, 3), (3, 3), (2, 2)):
        with baseline.attach(toy, budget, num_inference_steps=5) as handle:
            toy(rows)
        assert handle.stats.computed == computed * BLOCKS


def test_distances_add_up_the_branches() -> None:
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    l1, norm = _distances({0: [a, b], 1: [a, a]})
    assert l1.tolist() == [[0.0, 4.0], [4.0, 0.0]]
    assert norm.tolist() == [2.0, 4.0]


def test_on_pipelines(subject: Subject) -> None:
    baseline = PaperFeatures().calibrate(subject.pipe, subject.runs)
    with baseline.attach(subject.pipe, STEPS, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)
    with baseline.attach(subject.pipe, 2, num_inference_steps=STEPS) as handle:
        assert not torch.equal(subject.generate(), subject.full_run)
    calls = BLOCKS * subject.branches
    assert handle.stats == BaselineStats("blocks", 2 * calls, (STEPS - 2) * calls)
    assert torch.equal(subject.generate(), subject.full_run)


def test_missing_calibration_raises(flux: Subject) -> None:
    with pytest.raises(ValueError, match="no schedules: calibrate it first"):
        PaperFeatures().attach(flux.pipe, 4, num_inference_steps=STEPS)
    with pytest.raises(ValueError, match="no complete run"):
        PaperFeatures().calibrate(flux.pipe, lambda: None)
