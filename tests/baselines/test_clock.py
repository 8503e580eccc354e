"""Steps and branches, counted where no pipeline reports them; a new run object per run."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from ertacache.baselines import BaselineStats
from ertacache.baselines.clock import BaselineRun, Clock, first_tensor, with_first_tensor
from ertacache.integration.tracker import NetworkCall, StepCall
from tests.baselines.toy import ToyPipe


def test_steps_and_branches_of_two_runs() -> None:
    pipe, seen, starts, ends = ToyPipe(), list[Any](), list[Any](), list[Any]()

    class Run(BaselineRun):
        def __init__(self) -> None:
            super().__init__()
            starts.append(clock.run)

        def call(self, call: NetworkCall) -> Any:
            assert clock.run is self
            seen.append((self.step, self.branch))
            self.computed += 1
            return call.compute()

        def end(self) -> None:
            ends.append(clock.run)

    clock = Clock(pipe, Run, num_steps=2)
    for _ in range(2):
        pipe([[1.0, 2.0], [3.0]])
    clock.remove()
    assert seen == 2 * [(0, 0), (0, 1), (1, 0)]
    assert starts == ends == [None, None]
    pipe([[1.0]])
    assert clock.stats("calls") == BaselineStats("calls", 6, 0)
    assert "step" not in vars(pipe.scheduler)
    assert "forward" not in vars(pipe.transformer)


def test_every_run_has_a_new_object() -> None:
    pipe, made = ToyPipe(), list[BaselineRun]()

    class Run(BaselineRun):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    clock = Clock(pipe, Run)
    pipe([[1.0]])
    pipe.scheduler.set_timesteps(2)  # a run that goes no further
    assert clock.run is made[1]
    pipe([[1.0]] * 3)
    assert len(set(made)) == 3
    assert [run.step for run in made] == [1, 0, 3]
    clock.remove()


def test_stats_add_up_all_runs() -> None:
    pipe = ToyPipe()

    class Run(BaselineRun):
        def call(self, call: NetworkCall) -> Any:
            self.computed += 1
            self.reused += 10
            return call.compute()

    clock = Clock(pipe, Run)
    pipe([[1.0]] * 2)
    pipe.scheduler.set_timesteps(3)
    pipe.transformer(torch.ones(1))
    assert clock.stats("calls") == BaselineStats("calls", 3, 30)  # the present run included
    clock.remove()
    assert clock.stats("calls") == BaselineStats("calls", 3, 30)


def test_wrong_number_of_steps_is_refused() -> None:
    pipe = ToyPipe()
    clock = Clock(pipe, BaselineRun, num_steps=2)
    with pytest.raises(ValueError, match=r"of 2 steps, but this one has 3: attach again"):
        pipe([[1.0]] * 3)
    clock.remove()


def test_any_number_of_steps_when_none_is_given() -> None:
    pipe = ToyPipe()
    clock = Clock(pipe, BaselineRun)
    pipe([[1.0]] * 3)
    assert clock.num_steps == 3
    clock.remove()


def test_run_that_fails_is_over() -> None:
    pipe = ToyPipe()

    class Failing(BaselineRun):
        def call(self, call: NetworkCall) -> Any:
            raise KeyboardInterrupt

    clock = Clock(pipe, Failing)
    with pytest.raises(KeyboardInterrupt):
        pipe([[1.0]])
    assert clock.run is None
    clock.remove()
    assert pipe([[1.0]]) == [[16.0]]


def test_nothing_of_a_run_is_held_when_it_is_over() -> None:
    made: list[weakref.ref[BaselineRun]] = []

    def make() -> BaselineRun:
        run = BaselineRun()
        made.append(weakref.ref(run))
        return run

    pipe = ToyPipe()
    clock = Clock(pipe, make)
    pipe([[1.0]] * 3)
    assert len(made) == 1
    assert made[0]() is None
    clock.remove()


def test_run_may_give_the_scheduler_another_output() -> None:
    pipe, given = ToyPipe(), list[float]()

    class Doubling(BaselineRun):
        def advance(self, call: StepCall) -> Any:
            result = call.original_step(2 * call.model_output)
            given.append(call.model_output.item())
            return result

    clock = Clock(pipe, Doubling)
    assert pipe([[1.0], [2.0]]) == [[16.0], [32.0]]
    clock.remove()
    assert given == [32.0, 64.0]


def test_output_of_any_form_with_another_tensor_in_it() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    for output in (one, (one,), (one, "more"), Transformer2DModelOutput(sample=one)):
        changed = with_first_tensor(output, other)
        assert type(changed) is type(output)
        assert first_tensor(changed) is other
        assert first_tensor(output) is one
    assert with_first_tensor((one, "more"), other)[1] == "more"
