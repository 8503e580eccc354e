"""Sigma tables: read off every scheduler, and replaced by an adjusted one."""

from __future__ import annotations

import pytest
import torch

from ertacache.integration import SchedulerError, nominal, read_sigmas
from ertacache.integration.tables import install_sigmas, variance_preserving_update
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make

# Two of the schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")


@pytest.fixture(params=list(DETERMINISTIC))
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return Sampling(make(request.param))


def test_table_descends_and_repeats(sampling: Sampling) -> None:
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


def test_ascending_table_is_mirrored() -> None:
    scheduler = make("FlowMatchEulerDiscreteScheduler", invert_sigmas=True)
    scheduler.set_timesteps(STEPS)
    straight = make("FlowMatchEulerDiscreteScheduler")
    straight.set_timesteps(STEPS)
    torch.testing.assert_close(read_sigmas(scheduler), read_sigmas(straight), rtol=0, atol=1e-6)


def test_table_that_stands_still_is_refused() -> None:
    scheduler = make("DDIMScheduler", steps_offset=0)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(SchedulerError, match="do not descend at every step"):
        read_sigmas(scheduler)


@pytest.mark.parametrize("kind", ["v_prediction", "epsilon", "sample"])
def test_closed_form_of_ddim(kind: str) -> None:
    scheduler = make("DDIMScheduler", prediction_type=kind)
    scheduler.set_timesteps(STEPS)
    form = variance_preserving_update(read_sigmas(scheduler), kind)
    torch.testing.assert_close(form, nominal(scheduler), rtol=1e-4, atol=1e-5)


def test_installed_table(sampling: Sampling) -> None:
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
    if hasattr(sampling.scheduler, "sigmas"):
        assert torch.equal(sampling.scheduler.sigmas, moved.float())


def test_timesteps_of_a_flow_follow_its_own_rule() -> None:
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    scheduler.set_timesteps(200)
    moved = read_sigmas(scheduler)
    moved[1:-1] -= 0.3 * (moved[1:-1] - moved[2:])
    install_sigmas(scheduler, moved)
    assert torch.equal(scheduler.timesteps, moved[:-1].float() * 1000)


def test_moved_timestep_has_the_noise_of_its_sigma() -> None:
    """Of all timesteps, the one in the table whose share of noise is nearest."""
    scheduler = make("CogVideoXDDIMScheduler")
    scheduler.set_timesteps(STEPS)
    moved = read_sigmas(scheduler)
    moved[1:-1] *= torch.linspace(0.99, 0.91, STEPS - 1, dtype=torch.float64)
    install_sigmas(scheduler, moved)
    a, s = scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt()
    nearest = ((s / (a + s))[None] - moved[:-1, None]).abs().argmin(1)
    assert torch.equal(scheduler.timesteps, nearest)
