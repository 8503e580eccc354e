"""The sigma schedule and the steps of RFLOW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ertacache.integration.schedulers import first_order_update, read_sigmas
from ertacache.models.opensora import RFlowScheduler
from ertacache.models.opensora.scheduler import size_ratio
from tests.models.opensora.small import golden


@pytest.mark.parametrize(("num_frames", "name"), [(51, "timesteps_240p"), (1, "timesteps_image")])
def test_timesteps_are_the_public_ones(num_frames: int, name: str) -> None:
    scheduler = RFlowScheduler()
    scheduler.set_timesteps(30, height=240, width=426, num_frames=num_frames)
    torch.testing.assert_close(scheduler.timesteps, golden("sampling")[name], rtol=1e-6, atol=0)


def test_schedule_begins_with_noise_and_ends_with_data() -> None:
    scheduler = RFlowScheduler()
    scheduler.set_timesteps(7, height=48, width=44, num_frames=34)
    assert scheduler.sigmas[0] == 1  # where the public code rounds to above 1
    assert scheduler.sigmas[-1] == 0
    assert torch.equal(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)


def test_frames_beyond_a_full_micro_frame_do_not_count() -> None:
    assert size_ratio(240, 426, 17) == size_ratio(240, 426, 33)
    assert size_ratio(512, 512, 34) == pytest.approx(10**0.5)
    assert size_ratio(512, 512, 9) == pytest.approx(3**0.5)  # the public rule is undefined here


def test_euler_is_exact_on_a_straight_path() -> None:
    """Data minus noise is the velocity everywhere, so that any schedule ends at the data."""
    scheduler = RFlowScheduler()
    scheduler.set_timesteps(5, height=720, width=1280, num_frames=204)
    data, noise = torch.randn(2, 1, 4, 3, 2, 2)
    x = noise
    for t in scheduler.timesteps:
        torch.testing.assert_close(x, scheduler.add_noise(data, noise, t[None]))
        x = scheduler.step(data - noise, t, x).prev_sample
    torch.testing.assert_close(x, data)


def test_add_noise_takes_one_timestep_per_sample() -> None:
    data, noise = torch.zeros(2, 1, 1), torch.ones(2, 1, 1)
    mixed = RFlowScheduler().add_noise(data, noise, torch.tensor([250.0, 1000.0]))
    assert mixed.flatten().tolist() == [0.25, 1.0]


def test_is_read_like_any_other_scheduler() -> None:
    scheduler = RFlowScheduler(use_timestep_transform=False)
    scheduler.set_timesteps(4)
    assert read_sigmas(scheduler).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert first_order_update(scheduler).tolist() == [[1.0, 0.25]] * 4


def test_size_must_be_given() -> None:
    with pytest.raises(ValueError, match="pass height=, width= and num_frames="):
        RFlowScheduler().set_timesteps(30)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RFlowScheduler().set_timesteps(0, height=240, width=426, num_frames=51)


def test_unknown_timestep_is_refused() -> None:
    scheduler = RFlowScheduler(use_timestep_transform=False)
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match=r"3\.0 is not a timestep of this run"):
        scheduler.step(torch.zeros(1), 3.0, torch.zeros(1))


def test_half_precision_steps_are_computed_in_float32() -> None:
    scheduler = RFlowScheduler(use_timestep_transform=False)
    scheduler.set_timesteps(3)
    v, x = (torch.randn(64).bfloat16() for _ in range(2))
    stepped = scheduler.step(v, scheduler.timesteps[0], x, return_dict=False)[0]
    third = scheduler.sigmas[0] - scheduler.sigmas[1]
    assert torch.equal(stepped, (x.float() + third * v.float()).bfloat16())


def test_round_trip(tmp_path: Path) -> None:
    RFlowScheduler(transform_scale=2.0).save_pretrained(tmp_path)
    again = RFlowScheduler.from_pretrained(tmp_path)
    again.set_timesteps(2, height=512, width=512, num_frames=1)
    assert again.timesteps.tolist() == pytest.approx([1000.0, 2000 / 3])
