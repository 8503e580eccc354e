"""The tracker: what it reports of a run, however the run ends, and that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ertacache.integration.identity import find_denoisers
from ertacache.integration.tracker import NetworkCall, StepCall, Tracker, find_tracker
from tests.integration.sampling import STEPS as SAMPLED
from tests.integration.sampling import Sampling, make
from tests.integration.setting import STEPS, Observer, Setting

OVER = ("end", False, False)


@contextmanager
def tracked(pipe: Any, kind: type[Observer] = Observer) -> Iterator[list[Any]]:
    """The followers of the runs, one after another."""
    runs: list[Any] = []

    def start() -> Observer:
        runs.append(kind(len(pipe.scheduler.timesteps)))
        return runs[-1]  # type: ignore[no-any-return]

    tracker = Tracker(pipe, find_denoisers(pipe), start=start)
    try:
        yield runs
    finally:
        tracker.remove()


def euler() -> Sampling:
    return Sampling(make("FlowMatchEulerDiscreteScheduler"))


def steps_of(events: list[Any]) -> list[int]:
    return [event[1] for event in events if event[0] == "step"]


def test_a_run_is_reported_in_order(setting: Setting) -> None:
    """Every call with its number in its step, every step, the end, and then that of the loop."""
    with tracked(setting.pipe) as runs:
        result = setting.generate()
        setting.generate()
    calls = [[("call", k, i) for i in range(setting.branches)] for k in range(STEPS)]
    steps = [event for k in range(STEPS) for event in (*calls[k], ("step", k, setting.branches))]
    assert [run.events for run in runs] == 2 * [[*steps, OVER, ("loop left", False)]]
    assert torch.equal(result, setting.run.latents[-1])


def test_a_loop_without_progress_bar_ends_with_its_last_step() -> None:
    sampling = euler()
    with tracked(sampling) as runs:
        sampling()
    assert runs[0].events[-2:] == [("step", SAMPLED - 1, 1), OVER]


class Arguments(Observer):
    """Keeps what it is called with."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self.network: list[NetworkCall] = []
        self.scheduler: list[StepCall] = []

    def call(self, call: NetworkCall) -> Any:
        self.network.append(call)
        return call.compute()

    def step(self, call: StepCall) -> Any:
        self.scheduler.append(call)
        return call.original_step()


def test_what_is_known_of_a_call_and_a_step() -> None:
    sampling = euler()
    with tracked(sampling, Arguments) as runs:
        sampling()
    network, step = runs[0].network[3], runs[0].scheduler[3]
    assert network.module is sampling.unet
    assert torch.equal(network.args[0], step.sample)
    assert torch.equal(network.compute(), step.model_output)
    assert step.timestep == network.args[1]
    assert step.return_dict is True


class Substituting(Observer):
    """Another output for the first call, another output for the second step, another result."""

    def call(self, call: NetworkCall) -> Any:
        return torch.zeros(2, 3, 4) if call.step == 0 else call.compute()

    def step(self, call: StepCall) -> Any:
        if call.step == 1:
            return call.original_step(torch.ones(2, 3, 4))
        result = call.original_step()
        if call.step == 2:
            result.prev_sample = result.prev_sample + 1
        return result


def test_a_follower_decides_what_is_returned() -> None:
    sampling = euler()
    with tracked(sampling, Substituting):
        result = sampling()
    scheduler = copy.deepcopy(sampling.scheduler)
    scheduler.set_timesteps(SAMPLED)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for k, t in enumerate(scheduler.timesteps):
            v = (torch.zeros_like(x), torch.ones_like(x))[k] if k < 2 else sampling.unet(x, t)
            x = scheduler.step(v, t, x).prev_sample + (1 if k == 2 else 0)
    assert torch.equal(result, x)


@pytest.mark.parametrize("where", ["call", "step"])
def test_an_error_ends_the_run(flux: Setting, where: str) -> None:
    """Reported once, and the loop around it as failed; the next run has a follower of its own."""

    class Failing(Observer):
        def call(self, call: NetworkCall) -> Any:
            if where == "call" and call.step == 2 and len(runs) == 1:
                raise KeyboardInterrupt
            return super().call(call)

        def step(self, call: StepCall) -> Any:
            if where == "step" and call.step == 2 and len(runs) == 1:
                raise KeyboardInterrupt
            return super().step(call)

    with tracked(flux.pipe, Failing) as runs:
        with pytest.raises(KeyboardInterrupt):
            flux.generate()
        assert runs[0].events[-2:] == [("end", True, False), ("loop left", True)]
        assert steps_of(runs[0].events) == [0, 1]
        assert torch.equal(flux.generate(), flux.run.latents[-1])
        assert runs[1].events[-2:] == [OVER, ("loop left", False)]


def test_a_run_broken_off_between_steps_ends_with_its_loop(flux: Setting) -> None:
    def fail(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return values

    with tracked(flux.pipe) as runs:
        with pytest.raises(KeyboardInterrupt):
            flux.generate(callback_on_step_end=fail)
        assert runs[0].events[-2:] == [("end", True, False), ("loop left", True)]


def test_a_run_broken_off_without_progress_bar_ends_with_the_next() -> None:
    sampling = euler()
    with tracked(sampling) as runs:
        sampling.scheduler.set_timesteps(SAMPLED)
        sampling.unet(torch.ones(2, 3, 4), sampling.scheduler.timesteps[0])
        sampling()
        assert runs[0].events == [("call", 0, 0), ("end", False, True)]
        assert steps_of(runs[1].events) == list(range(SAMPLED))
    assert len(runs) == 2


def test_removal_ends_the_run() -> None:
    sampling = euler()
    with tracked(sampling) as runs:
        sampling.scheduler.set_timesteps(SAMPLED)
    assert runs[0].events == [OVER]


def test_outside_of_a_run_nothing_is_reported() -> None:
    """The network alone, and steps after the last one."""
    sampling, x = euler(), torch.ones(2, 3, 4)
    with tracked(sampling) as runs:
        sampling.unet(x, torch.tensor(1.0))
        assert runs == []
        sampling()
        before = list(runs[0].events)
        sampling.unet(x, torch.tensor(1.0))
        assert runs[0].events == before


def test_a_start_that_is_refused_is_no_run() -> None:
    """What follows is the scheduler's own."""
    sampling, x = euler(), torch.ones(2, 3, 4)

    def refuse() -> Observer:
        raise ValueError("refused")

    full = sampling()
    tracker = Tracker(sampling, find_denoisers(sampling), start=refuse)
    with pytest.raises(ValueError, match="refused"):
        sampling()
    assert not tracker.running
    scheduler = sampling.scheduler
    stepped = scheduler.step(x, scheduler.timesteps[0], x).prev_sample
    assert torch.equal(stepped, x + (scheduler.sigmas[1] - scheduler.sigmas[0]) * x)
    tracker.remove()
    assert torch.equal(sampling(), full)


def test_found_by_scheduler_and_by_network() -> None:
    """Not by copies of either."""
    sampling, other = euler(), euler()
    networks = find_denoisers(sampling)
    assert find_tracker(sampling, networks) is None
    tracker = Tracker(sampling, networks, start=lambda: Observer(SAMPLED), owner="me")
    assert find_tracker(sampling, networks) is tracker
    assert (tracker.pipe, tracker.owner) == (sampling, "me")
    other.unet = sampling.unet
    assert find_tracker(other, find_denoisers(other)) is tracker
    other.unet, other.scheduler = copy.deepcopy(sampling.unet), copy.deepcopy(sampling.scheduler)
    assert find_tracker(other, find_denoisers(other)) is None
    tracker.remove()
    assert find_tracker(sampling, networks) is None


def test_nothing_is_left() -> None:
    sampling = euler()
    parts = (sampling, sampling.scheduler, sampling.unet)
    before = [dict(vars(part)) for part in parts]
    with tracked(sampling):
        assert [vars(part).keys() for part in parts] != [kept.keys() for kept in before]
    assert [vars(part).keys() for part in parts] == [kept.keys() for kept in before]


def test_methods_that_were_on_the_instance_come_back() -> None:
    """What someone else put there is called below, and is there again afterwards."""
    sampling, calls = euler(), list[int]()
    own = sampling.scheduler.step

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    sampling.scheduler.step = step
    with tracked(sampling):
        sampling()
    assert sampling.scheduler.step is step
    assert len(calls) == SAMPLED
