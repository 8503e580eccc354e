"""The recorder sees the full run and changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ertacache.core.sampler import run_reference
from ertacache.integration.record import record
from ertacache.integration.schedulers import SchedulerError
from tests.integration.sampling import DETERMINISTIC, Sampling, make
from tests.integration.setting import STEPS, Setting, count_calls
from tests.integration.tiny import call_arguments

# Some schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")


def test_records_what_the_pipeline_does(setting: Setting) -> None:
    """The record is of the full run, and does not decode."""
    arguments = setting.case.arguments | {"prompt": "a red circle moving left"}
    generator = torch.Generator().manual_seed(0)
    full = record(
        setting.pipe,
        num_inference_steps=STEPS,
        generator=generator,
        max_sequence_length=8,
        **arguments,
    )
    run = full.run
    assert torch.equal(full.schedule.sigmas, setting.sigmas)
    assert full.expert_steps == ()
    assert torch.equal(run.latents[-1], setting.generate())
    assert (len(run.latents), len(run.outputs)) == (STEPS + 1, STEPS)
    assert all(x.shape == run.latents[0].shape for x in (*run.latents, *run.outputs))


def test_record_of_a_flow_is_the_reference_run() -> None:
    """The Euler of core over the same network; its intervals are in float64, so not to the bit."""
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    run, sigmas = sampling.record()
    expected = run_reference(
        lambda x, sigma: sampling.unet(x, sigma.float() * 1000).detach(),
        run.latents[0],
        sigmas=sigmas,
    )
    for x, y in zip(run.latents, expected.latents, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_nothing_is_left_after_a_failed_record(flux: Setting) -> None:
    with pytest.raises(ValueError, match=r"Provide either `prompt`"):
        record(flux.pipe)
    assert "step" not in vars(flux.pipe.scheduler)
    assert torch.equal(flux.generate(), flux.run.latents[-1])


def test_record_of_two_experts(experts: Setting) -> None:
    """The step at which the second network takes over is where its calls begin."""
    networks = (experts.pipe.transformer, experts.pipe.transformer_2)
    with count_calls(*networks) as calls:
        full = record(experts.pipe, **call_arguments(experts.case))
    assert full.expert_steps == (calls.count(networks[0]) // 2,)
    assert torch.equal(full.run.latents[-1], experts.run.latents[-1])


def test_record_is_a_copy(flux: Setting) -> None:
    """What a callback does to the latents in place does not reach the record."""

    def clear(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == STEPS - 1:
            values["latents"].zero_()
        return values

    full = record(flux.pipe, **call_arguments(flux.case, callback_on_step_end=clear))
    for kept, right in zip(full.run.latents, flux.run.latents, strict=True):
        assert torch.equal(kept, right)


@pytest.mark.parametrize("name", list(DETERMINISTIC))
def test_record_of_a_run_that_begins_later(name: str) -> None:
    """Its latents, on the schedule that a copy of its scheduler takes from there on."""
    sampling = Sampling(make(name))
    start = sampling.record()[0].latents[4]
    full = record(sampling, start=4, latents=start)
    assert (full.run.num_steps, full.schedule.num_steps) == (6, 6)
    assert not full.schedule.begun
    assert torch.equal(full.schedule.sigmas, sampling.schedule().sigmas[4:])
    assert torch.equal(full.run.latents[0], start)
    assert torch.equal(full.run.latents[-1], sampling(start=4, latents=start))
    vectors = torch.stack([start, *full.run.outputs]).double()
    expected = torch.einsum("kj,j...->k...", full.schedule.latents, vectors)
    torch.testing.assert_close(
        torch.stack(full.run.latents).double(), expected, rtol=1e-4, atol=1e-4
    )


class Stopping(Sampling):
    """A pipeline that leaves its loop before the last step."""

    def __call__(self, **call: Any) -> Any:
        self.scheduler.set_timesteps(STEPS)
        x = torch.ones(2, 3, 4)
        for t in self.scheduler.timesteps[:5]:
            x = self.scheduler.step(self.unet(x, t), t, x).prev_sample
        return x


def test_run_that_ends_early_is_refused() -> None:
    with pytest.raises(
        SchedulerError, match=r"took 5 of the 8 steps .* only runs to the last step"
    ):
        record(Stopping(make("FlowMatchEulerDiscreteScheduler")))


class Copying(Sampling):
    """A pipeline that runs a copy of its scheduler."""

    def __call__(self, **call: Any) -> Any:
        inner = Sampling(copy.deepcopy(self.scheduler))
        return inner(**call)


def test_run_of_a_copied_scheduler_is_refused() -> None:
    with pytest.raises(SchedulerError, match="never called the step of its scheduler"):
        record(Copying(make("FlowMatchEulerDiscreteScheduler")))
