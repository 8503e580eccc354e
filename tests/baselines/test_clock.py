"""Steps and branches, counted where nobody tells them."""

from __future__ import annotations

from typing import Any

import pytest

from ertacache.baselines.clock import Clock
from tests.baselines.toy import ToyPipe


def test_steps_and_branches_of_two_runs() -> None:
    pipe, seen = ToyPipe(), list[Any]()

    def around(compute: Any) -> Any:
        seen.append((clock.step, clock.branch))
        return compute()

    clock = Clock(pipe, num_steps=2, around=around)
    starts, ends = [], []
    clock.at_start(lambda: starts.append(clock.step))
    clock.at_end(lambda: ends.append(clock.step))
    for _ in range(2):
        pipe([[1.0, 2.0], [3.0]])
    clock.remove()
    assert seen == 2 * [(0, 0), (0, 1), (1, 0)]
    assert starts == ends == [None, None]
    pipe([[1.0]])
    assert clock.calls == 6
    assert "step" not in vars(pipe.scheduler)
    assert "forward" not in vars(pipe.transformer)


def test_wrong_number_of_steps_is_refused() -> None:
    pipe = ToyPipe()
    clock = Clock(pipe, num_steps=2)
    with pytest.raises(ValueError, match=r"of 2 steps, but this one has 3: attach again"):
        pipe([[1.0]] * 3)
    clock.remove()


def test_any_number_of_steps_when_none_is_asked() -> None:
    pipe = ToyPipe()
    clock = Clock(pipe)
    pipe([[1.0]] * 3)
    assert clock.num_steps == 3
    clock.remove()


def test_run_that_fails_is_over() -> None:
    pipe = ToyPipe()

    def fail(compute: Any) -> Any:
        raise KeyboardInterrupt

    clock = Clock(pipe, around=fail)
    with pytest.raises(KeyboardInterrupt):
        pipe([[1.0]])
    assert clock.step is None
    clock.remove()
    assert pipe([[1.0]]) == [[16.0]]
