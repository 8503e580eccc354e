"""Whole runs read off a scheduler: latents as linear algebra, noise levels, where a run begins."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch

from ertacache.formats.policy import PolicyError
from ertacache.integration.schedulers import (
    first_order_update,
    first_step,
    prediction_of,
    read_schedule,
    read_sigmas,
)
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make

# Some schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")


@pytest.fixture(params=list(DETERMINISTIC))
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return Sampling(make(request.param))


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
RUNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in DETERMINISTIC),
    *(("DDIMScheduler", {"prediction_type": kind}, {}) for kind in ("v_prediction", "sample")),
    ("DPMSolverMultistepScheduler", FLOW, {}),
    ("DPMSolverMultistepScheduler", {"solver_order": 3, "prediction_type": "v_prediction"}, {}),
    ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, {}),
    ("DEISMultistepScheduler", {}, {}),
    ("UniPCMultistepScheduler", {"prediction_type": "epsilon", "use_flow_sigmas": False}, {}),
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
