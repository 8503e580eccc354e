"""After ``detach`` the pipeline is as it was, whatever happened in between."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from ertacache.core import paper_steppers, steppers
from ertacache.formats.policy import PolicyError
from ertacache.integration.attach import attach
from ertacache.integration.choose import PlanChooser
from ertacache.integration.record import record
from tests.integration.setting import COMPUTED, METHODS, Setting, make_setting
from tests.integration.tiny import CASES, call_arguments, generate


def attributes(pipe: Any) -> list[set[str]]:
    return [set(vars(part)) for part in (pipe, pipe.scheduler, pipe.transformer)]


def test_run_after_detach_is_bit_equal(setting: Setting) -> None:
    for method in METHODS:
        policy, _ = setting.policy_of(method)
        with attach(setting.pipe, policy):
            assert not torch.equal(setting.generate(), setting.run.latents[-1])
        assert torch.equal(setting.generate(), setting.run.latents[-1])


@pytest.mark.parametrize("name", list(CASES))
def test_no_attribute_is_left(name: str) -> None:
    setting = make_setting(name)  # its pipeline had a run, and no policy
    pipe, other = setting.another().pipe, setting.pipe
    fresh = attributes(pipe)
    handle = attach(pipe, setting.paper_policy())
    assert attributes(pipe) != fresh
    handle.detach()
    assert attributes(pipe) == fresh
    handle.detach()  # a second time does nothing
    with attach(pipe, setting.paper_policy()):
        generate(pipe, CASES[name])
    assert attributes(pipe)[:2] == attributes(other)[:2]
    for name in vars(pipe.scheduler).keys() & {"sigmas", "timesteps"}:
        assert torch.equal(getattr(pipe.scheduler, name), getattr(other.scheduler, name))


Trouble = Callable[[Any, pytest.MonkeyPatch], AbstractContextManager[dict[str, Any]]]


@contextmanager
def in_the_network(pipe: Any, patch: pytest.MonkeyPatch) -> Any:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = pipe.transformer.proj_out.register_forward_hook(fail)
    yield {}
    hook.remove()


@contextmanager
def in_the_step(pipe: Any, patch: pytest.MonkeyPatch) -> Any:
    calls = []

    def broken(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    with patch.context() as inner:
        inner.setattr(steppers, "combine", broken(steppers.combine))
        inner.setattr(paper_steppers, "rectify", broken(paper_steppers.rectify))
        yield {}


@contextmanager
def in_the_choice(pipe: Any, patch: pytest.MonkeyPatch) -> Any:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with patch.context() as inner:
        inner.setattr(PlanChooser, "choose", interrupt)
        yield {}


@contextmanager
def between_steps(pipe: Any, patch: pytest.MonkeyPatch) -> Any:
    def callback(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return values

    yield {"callback_on_step_end": callback}


TROUBLES = [in_the_network, in_the_step, in_the_choice, between_steps]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: t.__name__)
def test_failed_run(setting: Setting, trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attached run is right, and so is the full one after detach."""
    for method in METHODS:
        policy, expected = setting.policy_of(method)
        with attach(setting.pipe, policy):
            with (
                trouble(setting.pipe, monkeypatch) as arguments,
                pytest.raises(KeyboardInterrupt),
            ):
                setting.generate(**arguments)
            assert torch.equal(setting.generate(), expected)
            with (
                trouble(setting.pipe, monkeypatch) as arguments,
                pytest.raises(KeyboardInterrupt),
            ):
                setting.generate(**arguments)
        assert torch.equal(setting.generate(), setting.run.latents[-1])


@pytest.mark.parametrize(
    "trouble", [in_the_network, in_the_step, between_steps], ids=lambda t: t.__name__
)
def test_network_is_free_after_a_failed_run(
    flux: Setting, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pipeline that shares it does not get what the failed run cached."""
    for method in METHODS:
        policy, _ = flux.policy_of(method)
        with attach(flux.pipe, policy) as handle:
            shared = type(flux.pipe)(**flux.pipe.components)
            shared.set_progress_bar_config(disable=True)
            shared.scheduler = copy.deepcopy(flux.pipe.scheduler)
            with (
                trouble(flux.pipe, monkeypatch) as arguments,
                pytest.raises(KeyboardInterrupt),
            ):
                flux.generate(**arguments)
            before = handle.stats
            assert torch.equal(generate(shared, flux.case), flux.run.latents[-1])
            assert handle.stats == before  # nor is it counted


def test_sigmas_of_a_failed_run_are_forgotten(
    flux: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run is checked by its own sigmas, not by those that were saved before."""
    with attach(flux.pipe, flux.paper_policy()):
        with between_steps(flux.pipe, monkeypatch) as arguments, pytest.raises(KeyboardInterrupt):
            flux.generate(**arguments)
        with pytest.raises(PolicyError, match="sigma schedule is not the one of the plan"):
            flux.generate(sigmas=torch.linspace(1, 0.05, 8).tolist())


def test_interrupted_run(flux: Setting) -> None:
    def stop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        pipe._interrupt = step == 3
        return values

    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        flux.generate(callback_on_step_end=stop)
        assert handle.stats.last.computed_steps + handle.stats.last.reused_steps == 4
        assert torch.equal(flux.generate(), flux.attached)


def test_run_ends_with_its_own_loop_only(flux: Setting) -> None:
    """Not with a progress bar inside of it, nor with that of a run before, closed late."""
    bars: list[Any] = []

    def keep(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        bars.append(pipe.progress_bar(total=1))
        if step == 4:
            raise KeyboardInterrupt
        return values

    def meanwhile(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        for bar in (*bars, pipe.progress_bar(total=1)):
            bar.close()
        return values

    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        with pytest.raises(KeyboardInterrupt):
            flux.generate(callback_on_step_end=keep)
        assert torch.equal(flux.generate(callback_on_step_end=meanwhile), flux.attached)
        assert handle.stats.last.computed_steps == len(COMPUTED)


def test_detach_in_the_middle_of_a_run(flux: Setting) -> None:
    """The rest of the run is the scheduler's own, on its own sigmas."""
    handle = attach(flux.pipe, flux.paper_policy())

    def leave(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 1:
            handle.detach()
        return values

    flux.generate(callback_on_step_end=leave)
    assert torch.equal(flux.pipe.scheduler.sigmas.double(), flux.sigmas)
    assert torch.equal(flux.generate(), flux.run.latents[-1])


def test_signatures_and_types_are_kept(setting: Setting) -> None:
    scheduler = setting.pipe.scheduler
    kind, methods = type(scheduler), ("step", "set_timesteps")
    before = [inspect.signature(getattr(scheduler, name)) for name in methods]
    forward = inspect.signature(setting.pipe.transformer.forward)
    with attach(setting.pipe, setting.trajectory_policy()):
        assert type(scheduler) is kind
        assert [inspect.signature(getattr(scheduler, name)) for name in methods] == before
        assert inspect.signature(setting.pipe.transformer.forward) == forward


def test_copies_of_the_scheduler_are_not_attached(flux: Setting) -> None:
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        twin = copy.deepcopy(flux.pipe.scheduler)
        twin.set_timesteps(3)
        x = torch.ones(1, 2, 2)
        stepped = twin.step(x, twin.timesteps[0], x).prev_sample
        assert handle.stats.runs == 0
    twin.set_timesteps(3)
    assert torch.equal(stepped, x + (twin.sigmas[1] - twin.sigmas[0]) * x)


def test_copies_of_the_pipeline_have_bars_of_their_own(flux: Setting) -> None:
    """A loop of the copy does not end the run of the original."""
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        twin = copy.deepcopy(flux.pipe)

        def meanwhile(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
            with twin.progress_bar(total=1):
                return values

        assert torch.equal(flux.generate(callback_on_step_end=meanwhile), flux.attached)
        assert handle.stats.last.computed_steps == len(COMPUTED)


def test_shared_parts_are_refused(flux: Setting) -> None:
    """A pipeline that shares the network, one that shares the scheduler, and a recording."""
    policy = flux.trajectory_policy()
    network, scheduler = (type(flux.pipe)(**flux.pipe.components) for _ in range(2))
    network.scheduler = copy.deepcopy(flux.pipe.scheduler)
    scheduler.transformer = flux.another().pipe.transformer
    before = attributes(network), attributes(scheduler)
    with attach(flux.pipe, policy):
        for pipe, part in (
            (network, "FluxTransformer2DModel"),
            (scheduler, "FlowMatchEulerDiscreteScheduler"),
        ):
            refused = rf"already attached to this {part}: call ertacache\.detach\(pipe\)"
            with pytest.raises(RuntimeError, match=refused):
                attach(pipe, policy)
            with pytest.raises(RuntimeError, match=refused):
                record(pipe, **call_arguments(flux.case))
        with pytest.raises(RuntimeError, match="already attached"):
            record(flux.pipe, **call_arguments(flux.case))
        assert attributes(network)[1] == before[0][1]
        assert attributes(scheduler)[2] == before[1][2]
        assert torch.equal(flux.generate(), flux.attached)
    attach(network, policy).detach()
    attach(scheduler, policy).detach()


def test_failed_attach_leaves_nothing(experts: Setting) -> None:
    """The second network is taken: the first and the scheduler are let go of again."""
    pipe = experts.pipe
    other = CASES["wan-experts"].build()
    other.register_modules(transformer_2=pipe.transformer_2)
    before = attributes(other)
    with attach(pipe, experts.trajectory_policy()), pytest.raises(RuntimeError, match="attached"):
        attach(other, experts.trajectory_policy())
    assert attributes(other) == before


def test_replaced_parts_are_noticed(flux: Setting) -> None:
    with attach(flux.pipe, flux.trajectory_policy()):
        scheduler, network = flux.pipe.scheduler, flux.pipe.transformer
        flux.pipe.scheduler = type(scheduler).from_config(scheduler.config)
        with pytest.raises(
            RuntimeError, match=r"pipe\.scheduler was replaced: call ertacache\.detach"
        ):
            flux.generate()
        flux.pipe.scheduler = scheduler
        flux.pipe.transformer = flux.another().pipe.transformer
        with pytest.raises(RuntimeError, match="none of the pipeline's networks"):
            flux.generate()
        flux.pipe.transformer = network


def test_error_inside_a_with_block_detaches(flux: Setting) -> None:
    with pytest.raises(PolicyError), attach(flux.pipe, flux.trajectory_policy(COMPUTED)):
        flux.generate(num_inference_steps=3)
    assert torch.equal(flux.generate(), flux.run.latents[-1])
