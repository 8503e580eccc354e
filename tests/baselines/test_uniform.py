"""Uniform reuse: which steps replay, and what."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.uniform import Uniform
from tests.baselines.cases import STEPS, Subject, count
from tests.baselines.toy import ToyPipe


def test_steps_between_replay_the_last_output_of_their_branch() -> None:
    pipe = ToyPipe()
    with Uniform().attach(pipe, 3, num_inference_steps=5) as handle:
        # Steps 0, 2 and 4 are computed.
        assert pipe([[k, 10.0 * k] for k in range(1, 6)]) == [
            [16.0, 160.0],
            [16.0, 160.0],
            [48.0, 480.0],
            [48.0, 480.0],
            [80.0, 800.0],
        ]
    assert handle.stats == BaselineStats("network calls", 6, 4)


@pytest.mark.parametrize("order", [1, 2])
def test_polynomials_of_the_step_are_extrapolated_exactly(order: int) -> None:
    rows = [[1.0 + 2.0 * k, 3.0 - k if order == 1 else 0.5 * k**2 - k] for k in range(8)]
    steps = (0, 1, 2, 5)
    pipe, method = ToyPipe(), Uniform(order=order, compute_steps=steps)
    with method.attach(pipe, len(steps), num_inference_steps=8) as handle:
        assert pipe(rows) == [pytest.approx([16 * x for x in row], rel=1e-4) for row in rows]
    assert handle.stats == BaselineStats("network calls", 8, 8)


def test_before_there_are_enough_outputs_the_order_is_lower() -> None:
    pipe = ToyPipe()
    with Uniform(order=2, compute_steps=(0, 2)).attach(pipe, 2, num_inference_steps=4):
        found = [row[0] for row in pipe([[k, 0.0] for k in (1.0, 5.0, 7.0, 0.0)])]
    assert found == pytest.approx([16.0, 16.0, 112.0, 160.0])  # then the line through two


def test_all_steps_computed_is_the_full_run(subject: Subject) -> None:
    with Uniform().attach(subject.pipe, STEPS, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)


def test_network_runs_on_computed_steps_only(subject: Subject) -> None:
    with (
        Uniform().attach(subject.pipe, 3, num_inference_steps=STEPS),
        count(subject.network.proj_out) as calls,
    ):
        assert not torch.equal(subject.generate(), subject.full_run)
    assert len(calls) == 3 * subject.branches
    assert torch.equal(subject.generate(), subject.full_run)
