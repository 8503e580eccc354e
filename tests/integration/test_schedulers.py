"""Schedules, sigmas, updates and both methods on every scheduler, without code for any of them."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from typing import Any

import diffusers
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
    first_step,
    install_sigmas,
    prediction_of,
    read_schedule,
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


# A whole run


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
RUNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in DETERMINISTIC),
    *(("DDIMScheduler", {"prediction_type": kind}, {}) for kind in ("v_prediction", "sample")),
    ("DPMSolverMultistepScheduler", FLOW, {}),
    ("DPMSolverMultistepScheduler", {"solver_order": 3, "prediction_type": "v_prediction"}, {}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, {}),
    ("DEISMultistepScheduler", {}, {}),
    ("UniPCMultistepScheduler", {"prediction_type": "epsilon"}, {}),
    ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}, {}),
    ("LMSDiscreteScheduler", {}, {}),
    ("DPMSolverSinglestepScheduler", {"lower_order_final": True}, {}),
    ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}, {}),
    ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, {"mu": 1.15}),
    ("FlowMatchEulerDiscreteScheduler", {}, {"sigmas": [1.0, 0.9, 0.5, 0.4, 0.3, 0.1, 0.05]}),
    ("DPMSolverMultistepScheduler", {}, {"timesteps": [999, 800, 790, 500, 300, 200, 10]}),
    ("EulerDiscreteScheduler", {}, {"timesteps": [999, 800, 790, 500, 300, 200, 10]}),
]


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize(("name", "config", "levels"), RUNS)
def test_latents_of_a_schedule_are_those_of_the_scheduler(
    name: str, config: dict[str, Any], levels: dict[str, Any], begin: int
) -> None:
    """On random outputs, in as many elements as make up for its single precision."""
    scheduler = make(name, **config)
    if not {"sigmas", "timesteps"} & levels.keys():
        levels = {"num_inference_steps": STEPS} | levels
    scheduler.set_timesteps(**levels)
    found = read_schedule(scheduler, begin=begin)
    T = len(scheduler.timesteps) - begin
    assert (found.num_steps, found.begun) == (T, begin == 0)
    assert torch.equal(found.sigmas, read_sigmas(scheduler)[begin:])
    assert torch.equal(found.nominal, first_order_update(scheduler)[begin:])
    assert not found.latents.triu(1).any()
    generator = torch.Generator().manual_seed(0)
    start, *outputs = torch.randn(1 + T, 1, 1, 16, 16, generator=generator)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    latents = [start]
    for v, t in zip(outputs, scheduler.timesteps[begin:], strict=True):
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(latents[-1], t)
        latents.append(scheduler.step(v, t, latents[-1], return_dict=False)[0])
    vectors = torch.stack([start, *outputs]).double().flatten(1)
    for x, row in zip(latents, found.latents, strict=True):
        size = (row[:, None] * vectors).abs().max()
        assert (x.double().flatten() - row @ vectors).abs().max() < 1e-5 * size


def test_a_schedule_is_read_and_nothing_is_changed(sampling: Sampling) -> None:
    """Also of a scheduler in the middle of a run, which goes on as if nothing had happened."""
    expected = sampling()
    sampling.scheduler.set_timesteps(STEPS)
    fresh = read_schedule(sampling.scheduler)
    below = sampling.scheduler.step

    def step(*args: Any, **kwargs: Any) -> Any:
        found = read_schedule(sampling.scheduler)
        assert torch.equal(found.latents, fresh.latents)
        assert torch.equal(found.sigmas, fresh.sigmas)
        return below(*args, **kwargs)

    sampling.scheduler.step = step
    state = torch.get_rng_state()
    assert torch.equal(sampling(), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_scale_of_latents_is_that_of_the_networks_input() -> None:
    """Of Euler sqrt(sigma^2 + 1), so that data and noise have the variance of DDIM's."""
    scheduler = make("EulerDiscreteScheduler")
    scheduler.set_timesteps(STEPS)
    for begin in (0, 4):
        expected = (scheduler.sigmas.double().square() + 1).sqrt()[begin:]
        found = read_schedule(scheduler, begin=begin).scale
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    plain = make("DPMSolverMultistepScheduler")
    plain.set_timesteps(STEPS)
    assert read_schedule(plain).scale.tolist() == [1.0] * (STEPS + 1)


def test_noise_levels_do_not_depend_on_the_kind_of_scheduler() -> None:
    """At equal timesteps, from sigmas that are s / a and from cumulative alphas."""
    config = {"timestep_spacing": "trailing", "steps_offset": 0, "set_alpha_to_one": True}
    found = []
    for name in ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"):
        known = inspect.signature(getattr(diffusers, name)).parameters
        scheduler = make(name, **{key: value for key, value in config.items() if key in known})
        scheduler.set_timesteps(STEPS)
        found.append(read_sigmas(scheduler))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-6)


def test_the_first_step_of_a_run(sampling: Sampling) -> None:
    """As the scheduler was told, or else by its first timestep, which may be one of a batch."""
    scheduler = sampling.scheduler
    scheduler.set_timesteps(STEPS)
    for begin in (0, 3, STEPS - 1):
        t = scheduler.timesteps[begin]
        assert first_step(scheduler, t) == first_step(scheduler, t.expand(2)) == begin
        assert first_step(scheduler, t.item()) == begin
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(2)
        assert first_step(scheduler, scheduler.timesteps[5]) == 2


def test_a_first_timestep_that_is_not_the_schedulers() -> None:
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    scheduler.set_timesteps(STEPS)
    with pytest.raises(PolicyError, match=r"timestep 999, which is 0 times .* detach it for this"):
        first_step(scheduler, torch.tensor(999.0))
    scheduler.timesteps = torch.tensor([3.0, 2.0, 2.0, 1.0])
    with pytest.raises(PolicyError, match="timestep 2, which is 2 times in the scheduler's"):
        first_step(scheduler, 2.0)


@pytest.mark.parametrize(
    ("name", "config", "prediction"),
    [
        ("FlowMatchEulerDiscreteScheduler", {}, "flow"),
        ("UniPCMultistepScheduler", {}, "flow"),
        ("UniPCMultistepScheduler", {"use_flow_sigmas": False, "prediction_type": "v"}, "v"),
        ("DDIMScheduler", {}, "epsilon"),
        ("CogVideoXDDIMScheduler", {}, "v_prediction"),
        ("EulerDiscreteScheduler", {"prediction_type": "sample"}, "sample"),
        ("EDMEulerScheduler", {}, "epsilon"),
    ],
)
def test_what_an_output_means(name: str, config: dict[str, Any], prediction: str) -> None:
    scheduler = make(name, **config)
    assert prediction_of(scheduler) == prediction
    scheduler.set_timesteps(STEPS)
    assert prediction_of(scheduler) == prediction


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


def test_last_step_of_no_length() -> None:
    """As Cosmos has it, which changes the sigmas that ``set_timesteps`` made."""
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    scheduler.set_timesteps(STEPS)
    nominal = read_sigmas(scheduler)
    scheduler.sigmas[-1] = scheduler.sigmas[-2]
    found = read_schedule(scheduler)
    assert torch.equal(found.sigmas, nominal)
    assert torch.equal(found.latents[-1], found.latents[-2])
    assert found.nominal[-1].tolist() == [1.0, 0.0]


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
