"""Runs that are not as the policy expects: one warning, with a remedy, and no wrong result."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tqdm import tqdm

from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.attach import attach
from ertacache.integration.record import record
from ertacache.integration.schedulers import SchedulerError, first_order_update
from tests.integration.reference import replayed
from tests.integration.sampling import STEPS, Field, Sampling, make
from tests.integration.setting import (
    COMPUTED,
    METHODS,
    Setting,
    count_calls,
    paper_plan,
    trajectory_plan,
    watch_steps,
)

PLANNED = (0, 1, 4, 7, 9)


def euler() -> Sampling:
    return Sampling(make("FlowMatchEulerDiscreteScheduler"))


def policy_of(sampling: Sampling, method: str, **changes: Any) -> Policy:
    _, sigmas = sampling.record()
    if method == "trajectory":
        return sampling.policy(trajectory_plan(first_order_update(sampling.scheduler), PLANNED))
    return sampling.policy(paper_plan(sigmas, PLANNED, **changes))


class Spoiled(Field):
    """One number of one output is not what it should be."""

    at, value = 0, 0.0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        output = super().forward(x, t)
        if self.calls == self.at:
            output.view(-1)[0] = self.value
        return output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", METHODS)
def test_output_that_is_not_finite(method: str, value: float) -> None:
    """A warning when the run is looked at, with its step; the run after it is right."""
    sampling = euler()
    sampling.unet = Spoiled()
    with attach(sampling, policy_of(sampling, method)) as handle:
        expected = sampling()
        sampling.unet.calls, sampling.unet.at, sampling.unet.value = 0, 3, value
        result = sampling()
        assert not bool(torch.isfinite(result).all())
        with pytest.warns(UserWarning, match=r"output on step 4 held NaN .* try bfloat16") as seen:
            assert handle.stats.runs == 2
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(sampling(), expected)
            assert handle.stats.runs == 3


@pytest.mark.parametrize("touch", ["the next run", "detach"])
def test_warning_at_the_next_touch(touch: str) -> None:
    """Of a loop without a progress bar, whose end is not seen."""
    sampling = euler()
    sampling.unet = Spoiled()
    handle = attach(sampling, policy_of(sampling, "trajectory"))
    sampling.unet.calls, sampling.unet.at, sampling.unet.value = 0, 1, float("nan")
    sampling()
    with pytest.warns(UserWarning, match="output on step 0 held NaN"):
        sampling() if touch == "the next run" else handle.detach()
    handle.detach()


def test_warning_at_the_end_of_the_loop(flux: Setting) -> None:
    """Before the pipeline returns; not if it fails, for then the error says more."""

    def fail(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        raise KeyboardInterrupt

    hook = flux.pipe.transformer.proj_out.register_forward_hook(lambda *a: a[2] * float("nan"))
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        with pytest.warns(UserWarning, match="output on step 0 held NaN") as seen:
            flux.generate()
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(KeyboardInterrupt):
                flux.generate(callback_on_step_end=fail)
            assert handle.stats.runs == 2
        hook.remove()
        flux.generate()


def test_steps_that_leave_the_range() -> None:
    """Every output is finite, so the network is not blamed."""
    sampling = euler()
    plan = policy_of(sampling, "trajectory").default.plan
    assert isinstance(plan, TrajectoryPlan)
    plan.coefficients[-1, 0, 0] = 1e300
    with attach(sampling, sampling.policy(plan)) as handle:
        sampling()
        with pytest.warns(UserWarning, match=r"every output .* was finite: .* range of float32"):
            assert handle.stats.runs == 1


class Guided(Sampling):
    """Guidance that comes and goes: in a second call, or in a batch of twice the size."""

    def __init__(self, guided: Callable[[int], bool], *, batched: bool) -> None:
        super().__init__(make("FlowMatchEulerDiscreteScheduler"))
        self._guided, self._batched = guided, batched

    @torch.no_grad()
    def __call__(self, **_: Any) -> Tensor:
        self.scheduler.set_timesteps(STEPS)
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
        for k, t in enumerate(self.scheduler.timesteps):
            if self._guided(k):
                v, away = self._pair(x, t)
                v = away + 2 * (v - away)
            else:
                v = self.unet(x, t)
            x = self.scheduler.step(v, t, x).prev_sample
        return x

    def _pair(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if self._batched:
            v, away = self.unet(torch.cat([x, -x]), t).chunk(2)
            return v, away
        return self.unet(x, t), self.unet(-x, t)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_guidance_that_comes_or_goes(method: str, early: bool, batched: bool) -> None:
    """On a reused step: the plan is followed on what the scheduler saw.

    Without a word if the pipeline does so itself, as when it was calibrated; with one warning if a
    callback may have done it.
    """
    sampling = Guided(lambda k: (k < 6) == early, batched=batched)
    run, _ = sampling.record()
    policy = policy_of(sampling, method, scale=1.0, rectified=False, reuse="velocity")
    sentence = "input changed its shape at reused step 6" if batched else "step 6 called the netw"
    with attach(sampling, policy), warnings.catch_warnings():
        warnings.simplefilter("error")
        sampling()
    with attach(sampling, policy) as handle:
        report = f"{sentence}.*calibrate with the arguments"
        with pytest.warns(UserWarning, match=report), watch_steps(sampling) as seen:
            result = sampling(callback_on_step_end=print)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(sampling(), result)
        # Where the input has another shape there is nothing to reuse.
        assert handle.stats.last.computed_steps == len(PLANNED) + batched
    if method == "trajectory":
        assert torch.equal(result, replayed(policy.default, seen)[-1])
    assert torch.equal(sampling(), run.latents[-1])


@pytest.mark.parametrize("setting", ["sd3"], indirect=True)
def test_callback_that_drops_guidance(setting: Setting) -> None:
    """As diffusers documents it: half of the batch goes in the middle of a run."""
    names = ["prompt_embeds", "pooled_prompt_embeds"]

    def drop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 3:
            pipe._guidance_scale = 0.0
            values = {name: values[name].chunk(2)[-1] for name in names}
        return values

    call = {"callback_on_step_end": drop, "callback_on_step_end_tensor_inputs": names}
    with attach(setting.pipe, setting.trajectory_policy()) as handle:
        with pytest.warns(UserWarning, match="input changed its shape at reused step 4") as seen:
            setting.generate(**call)
        assert len(seen) == 1
        assert handle.stats.last.computed_steps == len(COMPUTED) + 1


def test_file_replaced_while_attached(flux: Setting, tmp_path: Path) -> None:
    """The policy was read when it was attached."""
    path = tmp_path / "policy.safetensors"
    flux.trajectory_policy().save(path)
    with attach(flux.pipe, path) as handle:
        flux.trajectory_policy((0, 4)).save(path)
        assert torch.equal(flux.generate(), flux.attached)
        path.write_bytes(b"nothing")
        assert torch.equal(flux.generate(), flux.attached)
        path.unlink()
        assert torch.equal(flux.generate(), flux.attached)
    assert handle.policy.default.compute_steps == COMPUTED


def test_scheduler_changed_while_attached(flux: Setting) -> None:
    """In place: its sigmas show it, before the network is evaluated."""
    scheduler = flux.pipe.scheduler
    with attach(flux.pipe, flux.trajectory_policy()), count_calls(flux.pipe.transformer) as calls:
        scheduler.set_shift(5.0)
        with pytest.raises(PolicyError, match="sigma schedule is not the one of the plan"):
            flux.generate()
        assert not calls
        scheduler.set_shift(3.0)
        flux.generate()


def test_scheduler_replaced_during_a_run(flux: Setting) -> None:
    scheduler = flux.pipe.scheduler

    def swap(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 2:
            pipe.scheduler = type(scheduler).from_config(scheduler.config)
        return values

    with attach(flux.pipe, flux.trajectory_policy()):
        with pytest.raises(RuntimeError, match=r"pipe\.scheduler was replaced: call ertacache"):
            flux.generate(callback_on_step_end=swap)
        flux.pipe.scheduler = scheduler
        assert torch.equal(flux.generate(), flux.attached)


class Static(Field):
    """Outputs in the same memory every time, as a network in a CUDA graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(2, 3, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.memory.copy_(super().forward(x, t))


@pytest.mark.parametrize("cache_device", [None, "cpu"])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_that_are_overwritten(method: str, cache_device: str | None) -> None:
    results = []
    for network in (Field(), Static()):
        sampling = euler()
        sampling.unet = network
        with attach(sampling, policy_of(sampling, method), cache_device=cache_device):
            results.append(sampling())
    assert torch.equal(*results)


class OwnLoop(Sampling):
    """Updates its latent itself; begins, goes on and ends as it is asked to."""

    def __init__(self) -> None:
        super().__init__(make("FlowMatchEulerDiscreteScheduler"))

    def progress_bar(self, **_: Any) -> Any:
        return tqdm(disable=True)

    def maybe_free_model_hooks(self) -> None:
        """As the pipelines of diffusers do at their end."""

    @torch.no_grad()
    def __call__(
        self, begin: str = "set_timesteps", end: str = "", steps: int = STEPS, **_: Any
    ) -> Tensor:
        scheduler = copy.deepcopy(self.scheduler) if begin == "a copy" else self.scheduler
        if begin:
            scheduler.set_timesteps(STEPS)
        x, sigmas = torch.ones(2, 3, 4), torch.linspace(1, 0, STEPS + 1)
        with self.progress_bar() if end == "progress bar" else nullcontext():
            for k in range(steps):
                x = x + (sigmas[k + 1] - sigmas[k]) * self.unet(x, 1000 * sigmas[k])
            if steps < STEPS:
                raise KeyboardInterrupt
        if end == "end of the call":
            self.maybe_free_model_hooks()
        return x


NO_EFFECT = "had no effect.*: the loop called the network 10 times, but never {} of pipe.scheduler"


@pytest.mark.parametrize("begin", ["set_timesteps", "a copy", ""])
@pytest.mark.parametrize("end", ["progress bar", "end of the call"])
def test_a_loop_that_never_calls_step(begin: str, end: str) -> None:
    """Said at the end of the call, once."""
    loop = OwnLoop()
    method = "step" if begin == "set_timesteps" else "set_timesteps"
    policy, full = policy_of(euler(), "trajectory"), loop(begin)
    with attach(loop, policy):
        with pytest.warns(UserWarning, match=NO_EFFECT.format(method)) as seen:
            assert torch.equal(loop(begin, end), full)
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop(begin, end)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SchedulerError, match="never called the step of its scheduler"):
            record(loop, begin=begin, end=end)


@pytest.mark.parametrize(
    ("begin", "touch"),
    [("set_timesteps", "the next run"), ("set_timesteps", "detach"), ("", "detach")],
)
def test_a_loop_that_never_calls_step_and_whose_end_is_not_seen(begin: str, touch: str) -> None:
    loop = OwnLoop()
    handle = attach(loop, policy_of(euler(), "trajectory"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(begin)
    method = "step" if begin else "set_timesteps"
    with pytest.warns(UserWarning, match=NO_EFFECT.format(method)):
        Sampling.__call__(loop) if touch == "the next run" else handle.detach()
    handle.detach()


@pytest.mark.filterwarnings("error:the policy had no effect")
@pytest.mark.parametrize("end", ["progress bar", "end of the call", ""])
def test_loops_that_the_policy_has_an_effect_on_or_that_break_off(end: str) -> None:
    """Nor is anything said of calls of the network alone."""
    loop = OwnLoop()
    policy = policy_of(euler(), "trajectory")
    with attach(loop, policy) as handle:
        for begin in ("set_timesteps", ""):
            with pytest.raises(KeyboardInterrupt):
                loop(begin, end, steps=1)
        Sampling.__call__(loop)
        loop.maybe_free_model_hooks()
        for _ in range(3):
            loop.unet(torch.ones(2, 3, 4), torch.tensor(1.0))
        assert handle.stats.last.reused_steps == STEPS - len(PLANNED)
    with pytest.raises(KeyboardInterrupt), attach(loop, policy):
        loop("set_timesteps", end, steps=STEPS - 1)


@pytest.mark.filterwarnings("error:the policy had no effect")
def test_pipelines_that_the_policy_has_an_effect_on(setting: Setting) -> None:
    with attach(setting.pipe, setting.trajectory_policy()) as handle:
        for output_type in ("latent", "pt"):
            setting.generate(output_type=output_type)
            assert handle.stats.last.reused_steps > 0


def test_a_run_that_begins_while_an_error_is_handled(flux: Setting) -> None:
    """As after a larger one that ran out of memory: it has not failed, and is reported on."""
    sampling = euler()
    sampling.unet = Spoiled()
    with attach(sampling, policy_of(sampling, "trajectory")) as handle:
        sampling.unet.calls, sampling.unet.at, sampling.unet.value = 0, 3, float("nan")
        try:
            raise MemoryError
        except MemoryError:
            sampling()
        with pytest.warns(UserWarning, match="output on step 4 held NaN"):
            assert handle.stats.runs == 1
