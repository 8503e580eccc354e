"""Sigmas, updates and both methods on every scheduler, without code for any of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.policy import PolicyError
from ertacache.integration.attach import attach
from ertacache.integration.record import record
from ertacache.integration.schedulers import (
    SchedulerError,
    SigmaAdjustment,
    StepForms,
    check_deterministic,
    first_order_update,
    install_sigmas,
    read_sigmas,
    variance_preserving_update,
)
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make
from tests.integration.setting import paper_plan, trajectory_plan

# Two of the schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")

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


def test_first_order_update_is_what_the_scheduler_does(sampling: Sampling) -> None:
    run, _ = sampling.record()
    update = first_order_update(sampling.scheduler)  # of a scheduler that has a run behind it
    sampling.scheduler.set_timesteps(STEPS)
    assert torch.equal(update, first_order_update(sampling.scheduler))
    higher = type(sampling.scheduler).__name__ in HIGHER_ORDER
    for k in range(1 if higher else STEPS):
        x = update[k, 0] * run.latents[k].double() + update[k, 1] * run.outputs[k].double()
        torch.testing.assert_close(x.float(), run.latents[k + 1], rtol=1e-4, atol=1e-5)


DPM = "DPMSolverMultistepScheduler"


@pytest.mark.parametrize(
    ("name", "config", "first_order"),
    [
        ("LMSDiscreteScheduler", {}, make("EulerDiscreteScheduler")),
        ("DPMSolverSinglestepScheduler", {"lower_order_final": True}, make(DPM)),
        (DPM, {"solver_order": 3}, make(DPM, solver_order=1)),
    ],
)
def test_first_order_update_has_no_history(
    name: str, config: dict[str, Any], first_order: Any
) -> None:
    """Neither that of a run nor that of the steps probed before, whatever a scheduler keeps."""
    sampling = Sampling(make(name, **config))
    sampling()
    first_order.set_timesteps(STEPS)
    expected = first_order_update(first_order)
    torch.testing.assert_close(first_order_update(sampling.scheduler), expected)


def test_first_order_update_leaves_the_scheduler_alone(sampling: Sampling) -> None:
    sampling.scheduler.set_timesteps(STEPS)
    before, state = torch.get_rng_state(), copy.deepcopy(vars(sampling.scheduler))
    first_order_update(sampling.scheduler)
    assert torch.equal(torch.get_rng_state(), before)
    assert vars(sampling.scheduler).keys() == state.keys()
    assert getattr(sampling.scheduler, "step_index", None) is None


@pytest.mark.parametrize("config", [{"clip_sample": True}, {"thresholding": True}])
def test_clipping_is_not_linear(config: dict[str, Any]) -> None:
    scheduler = make("DDIMScheduler", **config)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(SchedulerError, match="not linear: turn clip_sample"):
        first_order_update(scheduler)


def test_division_by_zero_is_named() -> None:
    scheduler = make("DDIMScheduler", rescale_betas_zero_snr=True, timestep_spacing="trailing")
    scheduler.set_timesteps(STEPS)
    with pytest.raises(SchedulerError, match="step 0 of DDIMScheduler divides by zero"):
        first_order_update(scheduler)


def test_trajectory_is_the_plan_on_every_scheduler(sampling: Sampling) -> None:
    run, _ = sampling.record()
    plan = trajectory_plan(first_order_update(sampling.scheduler), COMPUTED)
    with attach(sampling, sampling.policy(plan)) as handle:
        sampling.unet.calls = 0
        result = sampling()
        assert sampling.unet.calls == len(COMPUTED) == handle.stats.last.computed_steps
        assert torch.equal(sampling(), result)
    assert bool(torch.isfinite(result).all())
    assert torch.equal(sampling(), run.latents[-1])


def test_first_order_plan_with_all_steps_is_the_run(first_order: Sampling) -> None:
    run, _ = first_order.record()
    update = first_order_update(first_order.scheduler)
    plan = TrajectoryPlan(tuple(range(STEPS)), update[:, None])
    with attach(first_order, first_order.policy(plan)):
        torch.testing.assert_close(first_order(), run.latents[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.7, 0.3, 1e-3, 0.0])
def test_paper_on_adjusted_sigmas(sampling: Sampling, scale: float) -> None:
    """No length of a reused step blows up, and shorter ones stay near the full run."""
    run, sigmas = sampling.record()
    plan = paper_plan(sigmas, COMPUTED, scale=scale, reuse="velocity", rectified=False)
    with attach(sampling, sampling.policy(plan)):
        sampling.unet.calls = 0
        result = sampling()
        assert sampling.unet.calls == len(COMPUTED)
        assert torch.equal(sampling(), result)
    # Most for CogVideoX, whose last step is 0.4 of the schedule even when nothing is adjusted.
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
    for run in (lambda: attach(bad, policy), lambda: record(bad)):
        with pytest.raises(SchedulerError, match=f"^{name} .*: use {instead}$"):
            run()
    assert torch.equal(torch.get_rng_state(), state)
    assert bad.unet.calls == 0


@pytest.mark.parametrize("extra", [{"eta": 0.5}, {"variance_noise": torch.zeros(2, 3, 4)}])
def test_noise_passed_to_a_step_is_refused(extra: dict[str, Any]) -> None:
    sampling = Sampling(make("DDIMScheduler"))
    run, sigmas = sampling.record()
    policy = sampling.policy(paper_plan(sigmas, range(STEPS), scale=1.0, rectified=False))
    with attach(sampling, policy):
        with pytest.raises(PolicyError, match=f"passes {next(iter(extra))} to DDIMScheduler.step"):
            sampling(**extra)
        assert torch.equal(sampling(eta=0.0), run.latents[-1])
    with pytest.raises(PolicyError, match="leave it at"):
        record(sampling, **extra)


@pytest.mark.parametrize("method", ["trajectory", "paper"])
def test_plan_of_a_whole_run_is_not_for_one_that_begins_late(
    sampling: Sampling, method: str
) -> None:
    """As image to image does; the first timestep shows it, not the scheduler."""
    run, sigmas = sampling.record()
    if method == "paper":
        plan: Any = paper_plan(sigmas, range(STEPS), scale=1.0, rectified=False)
    else:
        plan = trajectory_plan(first_order_update(sampling.scheduler), COMPUTED)
    with attach(sampling, sampling.policy(plan)):
        with pytest.raises(PolicyError, match="the run has 6 steps, but the plan is for 10 and "):
            sampling(start=4)
        sampling()
    assert torch.equal(sampling(), run.latents[-1])


def test_scheduler_set_to_begin_late_is_refused_before_the_network() -> None:
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    plan = trajectory_plan(torch.ones(STEPS, 2, dtype=torch.float64), COMPUTED)
    with attach(sampling, sampling.policy(plan)):
        sampling(announced=True)
        sampling.unet.calls = 0
        with pytest.raises(PolicyError, match="comes without a profile"):
            sampling(start=4, announced=True)
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
    plan = trajectory_plan(first_order_update(sampling.scheduler), COMPUTED)
    with attach(sampling, sampling.policy(plan)):
        below, count = sampling.scheduler.step, iter(range(STEPS))

        def step(*args: Any, **kwargs: Any) -> Any:
            with NoWaiting() if next(count) else nullcontext():
                return below(*args, **kwargs)

        sampling.scheduler.step = step
        sampling()
        sampling.scheduler.step = below
    assert next(count, None) is None  # every step was watched


def test_sigmas_descend_and_repeat(sampling: Sampling) -> None:
    run, sigmas = sampling.record()
    assert sigmas.dtype == torch.float64
    assert len(sigmas) == STEPS + 1 == run.num_steps + 1
    assert bool((sigmas.diff() < 0).all())
    assert torch.equal(read_sigmas(sampling.scheduler), sigmas)


def test_share_of_noise_is_the_sigma_of_a_flow() -> None:
    """The last entry before the end, by hand: s / (a + s) with a^2 = alphas_cumprod[t]."""
    scheduler = make("CogVideoXDDIMScheduler")
    scheduler.set_timesteps(STEPS)
    sigmas = read_sigmas(scheduler)
    alpha = float(scheduler.alphas_cumprod[99])
    assert sigmas[-2] == pytest.approx((1 - alpha) ** 0.5 / (alpha**0.5 + (1 - alpha) ** 0.5))
    assert sigmas[0] == 1
    assert sigmas[-1] == 0


def test_ascending_sigmas_are_mirrored() -> None:
    scheduler = make("FlowMatchEulerDiscreteScheduler", invert_sigmas=True)
    scheduler.set_timesteps(STEPS)
    straight = make("FlowMatchEulerDiscreteScheduler")
    straight.set_timesteps(STEPS)
    torch.testing.assert_close(read_sigmas(scheduler), read_sigmas(straight), rtol=0, atol=1e-6)


def test_sigmas_that_stand_still_are_refused() -> None:
    scheduler = make("DDIMScheduler", steps_offset=0)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(SchedulerError, match="do not descend at every step"):
        read_sigmas(scheduler)


@pytest.mark.parametrize("kind", ["v_prediction", "epsilon", "sample"])
def test_closed_form_of_ddim(kind: str) -> None:
    scheduler = make("DDIMScheduler", prediction_type=kind)
    scheduler.set_timesteps(STEPS)
    form = variance_preserving_update(read_sigmas(scheduler), kind)
    torch.testing.assert_close(form, first_order_update(scheduler), rtol=1e-4, atol=1e-5)


def test_installed_sigmas(sampling: Sampling) -> None:
    """Entries that stay keep their timestep, others move between their neighbours."""
    sampling.scheduler.set_timesteps(STEPS)
    sigmas, times = read_sigmas(sampling.scheduler), sampling.scheduler.timesteps.clone()
    install_sigmas(sampling.scheduler, sigmas)
    assert torch.equal(sampling.scheduler.timesteps, times)
    moved = sigmas.clone()
    moved[4] = (sigmas[4] + sigmas[5]) / 2
    install_sigmas(sampling.scheduler, moved)
    now = sampling.scheduler.timesteps
    assert now.dtype == times.dtype
    kept = [k for k in range(STEPS) if k != 4]
    assert torch.equal(now[kept], times[kept])
    assert times[5] < now[4] < times[4]
    torch.testing.assert_close(read_sigmas(sampling.scheduler)[kept], sigmas[kept])
    if hasattr(sampling.scheduler, "sigmas"):
        torch.testing.assert_close(read_sigmas(sampling.scheduler), moved)


def test_timesteps_of_a_flow_follow_its_own_rule() -> None:
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    scheduler.set_timesteps(200)
    moved = read_sigmas(scheduler)
    moved[1:-1] -= 0.3 * (moved[1:-1] - moved[2:])
    install_sigmas(scheduler, moved)
    assert torch.equal(scheduler.timesteps, moved[:-1].float() * 1000)


def test_moved_timestep_has_the_noise_of_its_sigma() -> None:
    """Of all timesteps, the one whose share of noise is nearest."""
    scheduler = make("CogVideoXDDIMScheduler")
    scheduler.set_timesteps(STEPS)
    moved = read_sigmas(scheduler)
    moved[1:-1] *= torch.linspace(0.99, 0.91, STEPS - 1, dtype=torch.float64)
    install_sigmas(scheduler, moved)
    a, s = scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt()
    nearest = ((s / (a + s))[None] - moved[:-1, None]).abs().argmin(1)
    assert torch.equal(scheduler.timesteps, nearest)


@pytest.mark.parametrize("return_dict", [True, False])
def test_steps_of_a_policy_have_the_form_of_the_schedulers(
    sampling: Sampling, return_dict: bool
) -> None:
    """The same class, as many entries and the same dtype as the scheduler's own step."""
    scheduler = sampling.scheduler
    scheduler.set_timesteps(STEPS)
    forms, latent = StepForms(scheduler), torch.ones(2, 3, 4, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2, 3, 4, dtype=dtype)
        filled = forms.fill(latent, model_output=x, sample=x, return_dict=return_dict)
        own = copy.deepcopy(scheduler).step(x, scheduler.timesteps[0], x, return_dict=return_dict)
        assert type(filled) is type(own)
        assert filled[0].dtype == own[0].dtype
        assert torch.equal(filled[0].float(), torch.ones(2, 3, 4))
        if not return_dict:
            assert len(filled) == len(own)
    assert getattr(scheduler, "step_index", None) is None


def test_adjusted_sigmas_are_installed_and_restored(sampling: Sampling) -> None:
    """Only DDIM, which has no sigmas, and short steps of a history need a step of first order."""
    scheduler = sampling.scheduler
    scheduler.set_timesteps(STEPS)
    nominal, before = read_sigmas(scheduler), dict(vars(scheduler))
    moved = nominal.clone()
    moved[5] = nominal[4] + 0.25 * (nominal[5] - nominal[4])  # step 4 is short, step 5 long
    adjustment = SigmaAdjustment(scheduler, moved, nominal=nominal)
    assert adjustment.first_order(4) is None  # nothing is installed yet
    adjustment.install()
    rows = [adjustment.first_order(k) for k in range(STEPS)]
    if not hasattr(scheduler, "sigmas"):
        assert all(row is not None for row in rows)
    elif type(scheduler).__name__ in HIGHER_ORDER:
        assert [k for k, row in enumerate(rows) if row is not None] == [4]
    else:
        assert rows == [None] * STEPS
    if hasattr(scheduler, "sigmas"):
        torch.testing.assert_close(read_sigmas(scheduler), moved, rtol=0, atol=1e-5)
    adjustment.restore()
    assert vars(scheduler).keys() == before.keys()
    assert all(
        vars(scheduler)[name] is before[name] for name in before.keys() & {"timesteps", "sigmas"}
    )


def test_check_of_a_scheduler_that_needs_sigmas_of_its_own() -> None:
    """It cannot be probed before a run, which is checked when it starts."""
    scheduler = make("FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True)
    check_deterministic(scheduler, num_steps=STEPS)  # with a shift of its own
    scheduler = make("DPMSolverMultistepScheduler")
    check_deterministic(scheduler, num_steps=2000)  # more than the noise schedule has
