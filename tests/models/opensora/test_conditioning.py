"""Given frames: kept, or generated from a later timestep on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.models.opensora import RFlowScheduler
from ertacache.models.opensora.conditioning import FrameConditioning

NOISE = torch.zeros(2, 1, 3, 1, 1)
GIVEN = torch.ones(2, 1, 3, 1, 1)


def conditioning(strength: Tensor, latents: Tensor | None = GIVEN) -> FrameConditioning | None:
    return FrameConditioning.of(
        NOISE,
        latents=latents,
        strength=strength,
        scheduler=RFlowScheduler(),
        generator=torch.Generator().manual_seed(0),
    )


def test_frame_of_half_strength_is_kept_for_half_the_run() -> None:
    frames = conditioning(torch.tensor([1.0, 0.5, 0.0]))
    assert frames is not None
    x = frames.begin(NOISE)
    assert x[0].flatten().tolist() == [1, 1, 0]
    for t, moved in ((900.0, 1), (500.0, 2), (400.0, 2)):
        timestep = torch.tensor(t)
        before = frames.enter(x, timestep)
        assert (before[0] != x[0]).sum() == (1 if t == 500 else 0)  # noise is added once
        after = frames.leave(before, before + 1)
        assert (after[0] != before[0]).sum() == moved
        assert frames.generated(timestep)[1].tolist() == [False, t <= 500, True]
        x = after
    assert x[0, 0, 0] == 1


def test_mask_per_video() -> None:
    frames = conditioning(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    assert frames is not None
    assert frames.begin(NOISE).flatten(1).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_rounding_above_the_last_timestep_keeps_nothing() -> None:
    frames = conditioning(torch.tensor([1.0, 0.0, 0.0]))
    assert frames is not None
    assert frames.generated(torch.tensor(1000.0001))[0].tolist() == [False, True, True]


def test_mask_of_zeros_is_no_conditioning() -> None:
    assert conditioning(torch.zeros(3), None) is None


def test_inconsistent_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="a conditioning_mask needs conditioning_latents"):
        conditioning(torch.ones(3), None)
    with pytest.raises(ValueError, match="conditioning_latents need a conditioning_mask"):
        conditioning(torch.zeros(3))
    with pytest.raises(ValueError, match=r"between 0 .* and 1"):
        conditioning(torch.tensor([1.0, 2.0, 0.0]))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3\), got \(1,\)"):
        conditioning(torch.ones(1))
    with pytest.raises(
        ValueError, match=r"latents must have shape \(2, 1, 3, 1, 1\), got \(2, 1, 2"
    ):
        conditioning(torch.ones(3), GIVEN[:, :, :2])
