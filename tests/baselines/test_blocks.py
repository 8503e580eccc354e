"""The block stack, by mental arithmetic: every block doubles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ertacache.baselines import BaselineHandle, BaselineStats
from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, Rule, attach_blocks
from ertacache.baselines.private_api import find_blocks
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.toy import ToyPipe, known_blocks

MIDDLE = range(1, 3)


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with known_blocks():
        yield


def attach_rule(pipe: ToyPipe, rule: Rule) -> BaselineHandle:
    return attach_blocks(pipe, lambda: BlockRun(rule))


def reuse_middle(call: BlockCall) -> Decision:
    return Decision(reuse=(MIDDLE,)) if call.step % 2 else Decision(record=(MIDDLE,))


def test_delta_takes_the_place_of_the_range() -> None:
    pipe = ToyPipe()
    handle = attach_rule(pipe, reuse_middle)
    # Step 0: 1, 2, then 4 and 8: the two in the middle add 6, then 16. Step 1: 20 + 6, then 52.
    assert pipe([[1.0], [10.0]]) == [[16.0], [52.0]]
    assert handle.stats == BaselineStats("blocks", 4 + 2, 2)
    handle.detach()
    assert pipe([[1.0], [10.0]]) == [[16.0], [160.0]]


def test_branches_keep_their_own_deltas() -> None:
    pipe = ToyPipe()
    handle = attach_rule(pipe, reuse_middle)
    # The second branch adds 5 times as much: 30.
    assert pipe([[1.0, 5.0], [10.0, 10.0]]) == [[16.0, 80.0], [52.0, 100.0]]
    assert handle.stats.cached_bytes == 2 * 4  # a float per branch


def test_branch_without_a_delta_is_computed() -> None:
    pipe = ToyPipe()
    handle = attach_rule(pipe, lambda call: Decision(reuse=(MIDDLE,)))
    assert pipe([[1.0], [10.0, 10.0]]) == [[16.0], [52.0, 160.0]]
    assert handle.stats == BaselineStats("blocks", 4 + 2 + 4, 2)


def test_ranges_may_overlap_when_recorded() -> None:
    pipe, front, rear = ToyPipe(), range(3), range(1, 4)
    rules = {0: Decision(record=(front, rear)), 1: Decision(reuse=(front,)), 2: Decision((rear,))}
    attach_rule(pipe, lambda call: rules[call.step])
    # front adds 8 - 1 = 7, rear adds 16 - 2 = 14.
    assert pipe([[1.0], [10.0], [10.0]]) == [[16.0], [34.0], [34.0]]


def test_several_ranges_at_once() -> None:
    pipe, both = ToyPipe(), (range(0, 1), range(2, 4))
    attach_rule(pipe, lambda call: Decision(reuse=both) if call.step else Decision(record=both))
    # adds 1, doubles, adds 16 - 4 = 12: (10 + 1) * 2 + 12.
    assert pipe([[1.0], [10.0]]) == [[16.0], [34.0]]


def test_next_run_starts_afresh() -> None:
    pipe = ToyPipe()
    attach_rule(pipe, lambda call: Decision(reuse=(MIDDLE,)))
    assert pipe([[1.0], [10.0]]) == [[16.0], [52.0]]
    assert pipe([[10.0], [10.0]]) == [[160.0], [160.0]]


def test_outside_a_run_nothing_is_cached() -> None:
    pipe = ToyPipe()
    handle = attach_rule(pipe, lambda call: Decision(reuse=(MIDDLE,)))
    pipe([[1.0]])
    assert pipe.transformer(torch.tensor([10.0])).item() == 160.0
    assert handle.stats == BaselineStats("blocks", 4, 0)


def test_rule_sees_the_first_block() -> None:
    pipe, seen = ToyPipe(), list[tuple[int, int, float]]()

    def rule(call: BlockCall) -> Decision:
        assert call.block is pipe.transformer.blocks[0]
        seen.append((call.step, call.branch, call.arguments["hidden_states"].item()))
        return Decision()

    attach_rule(pipe, rule)
    pipe([[1.0, 2.0], [3.0]])
    assert seen == [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 3.0)]


def test_recording_alone_changes_no_bit(subject: Subject) -> None:
    rule = lambda call: Decision(record=(range(BLOCKS), range(1, 3)))  # noqa: E731
    with attach_blocks(subject.pipe, lambda: BlockRun(rule)) as handle:
        assert torch.equal(subject.generate(), subject.full_run)
    assert handle.stats == BaselineStats("blocks", STEPS * subject.branches * BLOCKS, 0)
    assert len(find_blocks(subject.network)) == BLOCKS
