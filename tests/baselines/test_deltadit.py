"""Delta-DiT: which blocks are replaced on which step."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.blocks import BlockCall, Decision
from ertacache.baselines.deltadit import DeltaDiT, DeltaSetting, choose_setting, decide
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.toy import Double, ToyPipe, known_blocks


def test_rear_blocks_first_then_front_blocks() -> None:
    setting = DeltaSetting(interval=2, num_cached=3, num_blocks=4, gate=4)
    rear, front = range(1, 4), range(3)
    found = [decide(setting, BlockCall(k, 0, Double(), {})) for k in range(8)]
    full = Decision(record=(rear, front))
    early, late = Decision(reuse=(rear,)), Decision(reuse=(front,))
    assert found == [full, early, full, early, full, late, full, late]


def test_mental_arithmetic() -> None:
    pipe = ToyPipe()
    with known_blocks(), DeltaDiT().attach(pipe, 0.625, num_inference_steps=4) as handle:
        # Interval 2, three blocks: rear adds 14 to 20, front adds 21 to 10, which is doubled.
        assert pipe([[1.0], [10.0], [3.0], [10.0]]) == [[16.0], [34.0], [48.0], [62.0]]
    assert handle.stats == BaselineStats("blocks", 10, 6)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 1 / 3, 0.25])
def test_share_is_met_within_half_a_block(share: float) -> None:
    setting = choose_setting(share, 9, 30)
    between = sum(k % setting.interval != 0 for k in range(30))
    computed = 1 - between * setting.num_cached / (30 * 9)
    assert computed == pytest.approx(share, abs=0.5 / 9)
    assert setting.num_cached < 9


def test_one_step_has_nothing_between() -> None:
    assert choose_setting(0.5, 9, 1).num_cached == 0


def test_on_pipelines(subject: Subject) -> None:
    with DeltaDiT().attach(subject.pipe, 0.5, num_inference_steps=STEPS) as handle:
        assert not torch.equal(subject.generate(), subject.full_run)
    # Interval 4, three of four blocks: steps 0 and 4 in full, one block on the other six.
    calls = subject.branches
    assert handle.stats == BaselineStats("blocks", (2 * BLOCKS + 6) * calls, 18 * calls)
    with DeltaDiT().attach(subject.pipe, 1.0, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)
    assert torch.equal(subject.generate(), subject.full_run)
