"""FasterCache: the same bits as through diffusers' own call."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import NotApplicableError
from ertacache.baselines.fastercache import FasterCache
from tests.baselines.cases import STEPS, Subject, count
from tests.baselines.direct import directly


def test_same_bits_as_used_directly(subject: Subject) -> None:
    baseline = FasterCache()
    changes = {"guidance_scale": 1.0} if subject.name == "wan" else {}
    expected = directly(subject.name, lambda pipe: baseline.config(pipe, 900.0, STEPS), **changes)
    with baseline.attach(subject.pipe, 900.0, num_inference_steps=STEPS) as handle:
        assert torch.equal(subject.generate(**changes), expected)
    assert handle.stats.reused > 0
    assert torch.equal(subject.generate(), subject.full_run)


def test_nothing_below_timestep_zero(subject: Subject) -> None:
    with FasterCache().attach(subject.pipe, 0.0, num_inference_steps=STEPS):
        torch.testing.assert_close(subject.generate(), subject.full_run)


def test_both_branches_on_the_same_steps(wan: Subject) -> None:
    with (
        FasterCache().attach(wan.pipe, 990.0, num_inference_steps=STEPS),
        count(wan.network.blocks[0].attn1.to_q) as own,
    ):
        wan.generate()
    assert len(own) == 2 * (1 + 3)  # step 0, then 2, 4 and 6


def test_unconditional_branch_is_left_out(cogvideox: Subject) -> None:
    sizes: list[int] = []
    hook = cogvideox.network.proj_out.register_forward_hook(lambda m, a, o: sizes.append(len(o)))
    with FasterCache().attach(cogvideox.pipe, 990.0, num_inference_steps=STEPS):
        cogvideox.generate()
    hook.remove()
    # Computed every fifth step, and on the first, whose timestep is above the bound.
    assert sizes == [2, 1, 1, 1, 1, 2, 1, 1]


def test_run_without_guidance_is_refused(cogvideox: Subject) -> None:
    with (
        FasterCache().attach(cogvideox.pipe, 900.0, num_inference_steps=STEPS),
        pytest.raises(NotApplicableError, match="use guidance"),
    ):
        cogvideox.generate(guidance_scale=1.0)
