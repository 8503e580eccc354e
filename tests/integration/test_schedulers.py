"""Tables, updates and both methods on every scheduler, without code for any of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ertacache.core.plan import TrajectoryPlan
from ertacache.formats.policy import PolicyError
from ertacache.integration import SchedulerError, attach, nominal, record_run
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make
from tests.integration.setting import paper_plan, trajectory_plan

# Two of the schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")

COMPUTED = (0, 1, 2, 4, 6, 8, 9)
HIGHER_ORDER = {"UniPCMultistepScheduler", "DPMSolverMultistepScheduler"}


@pytest.fixture(params=list(DETERMINISTIC))
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return Sampling(make(request.param))


@pytest.fixture(params=[name for name in DETERMINISTIC if name not in HIGHER_ORDER])
def first_order(request: pytest.FixtureRequest) -> Sampling:
    return Sampling(make(request.param))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_nominal_update_is_what_the_scheduler_does(sampling: Sampling) -> None:
    run, _ = sampling.record()
    update = nominal(sampling.scheduler)  # of a scheduler that has a run behind it
    sampling.scheduler.set_timesteps(STEPS)
    assert torch.equal(update, nominal(sampling.scheduler))
    higher = type(sampling.scheduler).__name__ in HIGHER_ORDER
    for k in range(1 if higher else STEPS):
        x = update[k, 0] * run.latents[k].double() + update[k, 1] * run.outputs[k].double()
        torch.testing.assert_close(x.float(), run.latents[k + 1], rtol=1e-4, atol=1e-5)


def test_nominal_leaves_the_scheduler_alone(sampling: Sampling) -> None:
    sampling.scheduler.set_timesteps(STEPS)
    before, state = torch.get_rng_state(), copy.deepcopy(vars(sampling.scheduler))
    nominal(sampling.scheduler)
    assert torch.equal(torch.get_rng_state(), before)
    assert vars(sampling.scheduler).keys() == state.keys()
    assert getattr(sampling.scheduler, "step_index", None) is None


@pytest.mark.parametrize("config", [{"clip_sample": True}, {"thresholding": True}])
def test_clipping_is_not_linear(config: dict[str, Any]) -> None:
    scheduler = make("DDIMScheduler", **config)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(SchedulerError, match="not linear: turn clip_sample"):
        nominal(scheduler)


def test_division_by_zero_is_told_apart() -> None:
    scheduler = make("DDIMScheduler", rescale_betas_zero_snr=True, timestep_spacing="trailing")
    scheduler.set_timesteps(STEPS)
    with pytest.raises(SchedulerError, match="step 0 of DDIMScheduler divides by zero"):
        nominal(scheduler)


def test_trajectory_is_the_plan_on_every_scheduler(sampling: Sampling) -> None:
    run, _ = sampling.record()
    plan = trajectory_plan(nominal(sampling.scheduler), COMPUTED)
    with attach(sampling, sampling.policy(plan)) as handle:
        sampling.unet.calls = 0
        result = sampling()
        assert sampling.unet.calls == len(COMPUTED) == handle.stats.last.computed_steps
        assert torch.equal(sampling(), result)
    assert bool(torch.isfinite(result).all())
    assert torch.equal(sampling(), run.latents[-1])


def test_nominal_plan_with_all_steps_is_the_run(first_order: Sampling) -> None:
    run, _ = first_order.record()
    update = nominal(first_order.scheduler)
    plan = TrajectoryPlan(tuple(range(STEPS)), update[:, 0], update[:, 1:])
    with attach(first_order, first_order.policy(plan)):
        torch.testing.assert_close(first_order(), run.latents[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.7, 0.3, 1e-3, 0.0])
def test_paper_on_adjusted_tables(sampling: Sampling, scale: float) -> None:
    """No length of a reused step blows up, and shorter ones stay near the full run."""
    run, sigmas = sampling.record()
    plan = paper_plan(sigmas, COMPUTED, scale=scale, reuse="velocity", rectified=False)
    with attach(sampling, sampling.policy(plan)):
        sampling.unet.calls = 0
        result = sampling()
        assert sampling.unet.calls == len(COMPUTED)
        assert torch.equal(sampling(), result)
    # Most for CogVideoX, whose last step is 0.4 of the table even when nothing is adjusted.
    assert relative(result, run.latents[-1]) < 0.2
    assert torch.equal(sampling(), run.latents[-1])


def test_paper_with_all_steps_is_the_run(sampling: Sampling) -> None:
    run, sigmas = sampling.record()
    plan = paper_plan(sigmas, range(STEPS), scale=1.0, rectified=False)
    with attach(sampling, sampling.policy(plan)):
        assert torch.equal(sampling(), run.latents[-1])


STOCHASTIC = {
    "CogVideoXDPMScheduler": ({}, "CogVideoXDDIMScheduler"),
    "EulerAncestralDiscreteScheduler": ({}, "EulerDiscreteScheduler"),
    "LCMScheduler": ({}, "DDIMScheduler"),
    "DDPMScheduler": ({}, "DDIMScheduler"),
    "TCDScheduler": ({}, "DDIMScheduler"),
    "HeunDiscreteScheduler": ({}, "EulerDiscreteScheduler"),
    "FlowMatchHeunDiscreteScheduler": ({}, "FlowMatchEulerDiscreteScheduler"),
    "FlowMatchLCMScheduler": ({}, "FlowMatchEulerDiscreteScheduler"),
    "FlowMatchEulerDiscreteScheduler": (
        {"stochastic_sampling": True},
        "FlowMatchEulerDiscreteScheduler with stochastic_sampling=False",
    ),
    "DPMSolverMultistepScheduler": (
        {"algorithm_type": "sde-dpmsolver++"},
        "DPMSolverMultistepScheduler with algorithm_type='dpmsolver\\+\\+'",
    ),
}


@pytest.mark.parametrize("name", list(STOCHASTIC))
def test_stochastic_scheduler_is_refused_by_name(name: str) -> None:
    config, instead = STOCHASTIC[name]
    good = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = good.policy(paper_plan(good.record()[1], range(STEPS)))
    bad = Sampling(make(name, **config))
    state = torch.get_rng_state()
    for run in (lambda: attach(bad, policy), lambda: record_run(bad)):
        with pytest.raises(SchedulerError, match=f"^{name} .*: use {instead}$"):
            run()
    assert torch.equal(torch.get_rng_state(), state)
    assert bad.unet.calls == 0


@pytest.mark.parametrize("extra", [{"eta": 0.5}, {"variance_noise": torch.zeros(2, 3, 4)}])
def test_noise_asked_for_in_a_step_is_refused(extra: dict[str, Any]) -> None:
    sampling = Sampling(make("DDIMScheduler"))
    run, sigmas = sampling.record()
    policy = sampling.policy(paper_plan(sigmas, range(STEPS), scale=1.0, rectified=False))
    with attach(sampling, policy):
        with pytest.raises(PolicyError, match=f"passes {next(iter(extra))} to DDIMScheduler.step"):
            sampling(**extra)
        assert torch.equal(sampling(eta=0.0), run.latents[-1])
    with pytest.raises(PolicyError, match="leave it at"):
        record_run(sampling, **extra)


def test_run_that_begins_late_is_refused(sampling: Sampling) -> None:
    """As image to image does; the scheduler is not told, so the first step tells."""
    _, sigmas = sampling.record()
    policy = sampling.policy(paper_plan(sigmas, range(STEPS), scale=1.0, rectified=False))
    with attach(sampling, policy), pytest.raises(PolicyError, match="does not begin with step 0"):
        sampling(start=4)
    with pytest.raises(SchedulerError, match="took 6 steps of its table"):
        record_run(sampling, start=4)


def test_scheduler_that_is_told_to_begin_late_is_refused_before_the_network() -> None:
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    plan = trajectory_plan(torch.ones(STEPS, 2, dtype=torch.float64), COMPUTED)
    with attach(sampling, sampling.policy(plan)):
        sampling(told=True)
        sampling.unet.calls = 0
        with pytest.raises(PolicyError, match="detach it for this call"):
            sampling(start=4, told=True)
    assert sampling.unet.calls == 0


def test_output_of_another_shape_is_refused() -> None:
    """It would be broadcast in silence; learned variances come as twice the channels."""
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    plan = trajectory_plan(torch.ones(STEPS, 2, dtype=torch.float64), COMPUTED)
    hook = sampling.unet.register_forward_hook(lambda _, args, output: output[:1])
    with (
        attach(sampling, sampling.policy(plan)),
        pytest.raises(PolicyError, match=r"shape \(1, 3, 4\) and the latent \(2, 3, 4\)"),
    ):
        sampling()
    hook.remove()


class NoWaiting(TorchDispatchMode):
    """Raises where a number is read off a tensor: an accelerator would have to be waited for."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_rectified_steps_read_no_number_off_a_tensor(sampling: Sampling) -> None:
    """After the first step, which looks up where the run begins."""
    sampling.record()
    plan = trajectory_plan(nominal(sampling.scheduler), COMPUTED)
    with attach(sampling, sampling.policy(plan)):
        below, count = sampling.scheduler.step, iter(range(STEPS))

        def step(*args: Any, **kwargs: Any) -> Any:
            with NoWaiting() if next(count) else nullcontext():
                return below(*args, **kwargs)

        sampling.scheduler.step = step
        sampling()
        sampling.scheduler.step = below
    assert next(count, None) is None  # every step was watched
