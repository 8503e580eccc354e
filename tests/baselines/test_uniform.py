"""Uniform reuse: which steps replay, and what."""

from __future__ import annotations

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
