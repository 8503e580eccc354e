"""Fewer steps begin where the full run begins."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

from ertacache.integration.spacing import same_start

KINDS = (
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "UniPCMultistepScheduler",
)


def levels(scheduler: Any, steps: int) -> list[float]:
    scheduler.set_timesteps(steps)
    found: list[float] = scheduler.timesteps.tolist()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_steps_with_leading_timesteps(kind: str) -> None:
    scheduler = getattr(diffusers, kind)(timestep_spacing="leading", steps_offset=1)
    full, fewer = levels(scheduler, 30), levels(scheduler, 10)
    assert fewer[0] < full[0]
    with same_start(scheduler, 30):
        assert levels(scheduler, 30) == full
        moved = levels(scheduler, 10)
        assert moved[0] == full[0]
        assert len(moved) == 10
        assert moved[-1] > fewer[-1]
    assert scheduler.config.steps_offset == 1
    assert levels(scheduler, 10) == fewer
    assert "set_timesteps" not in vars(scheduler)


@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
def test_other_spacings_are_left_alone(spacing: str) -> None:
    scheduler = diffusers.DDIMScheduler(timestep_spacing=spacing)
    fewer = levels(scheduler, 10)
    with same_start(scheduler, 30):
        assert "set_timesteps" not in vars(scheduler)
        assert levels(scheduler, 10) == fewer


def test_what_was_on_the_scheduler_comes_back() -> None:
    scheduler: Any = diffusers.DDIMScheduler(timestep_spacing="leading")
    mine = scheduler.set_timesteps
    scheduler.set_timesteps = mine
    with pytest.raises(KeyboardInterrupt), same_start(scheduler, 30):
        raise KeyboardInterrupt
    assert vars(scheduler)["set_timesteps"] is mine
