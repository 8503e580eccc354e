"""PAB: the same bits as through diffusers' own call; branches of guidance kept apart."""

from __future__ import annotations

import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.pab import PAB
from tests.baselines.cases import STEPS, Subject, count
from tests.baselines.direct import directly

WIDE = PAB(timesteps=(-1, 2000))


def test_same_bits_as_used_directly(any_subject: Subject) -> None:
    changes = {"guidance_scale": 1.0} if any_subject.name == "wan" else {}
    for baseline in (PAB(), WIDE):
        expected = directly(
            any_subject.name, lambda pipe, b=baseline: b.config(pipe, 3, STEPS), **changes
        )
        with baseline.attach(any_subject.pipe, 3, num_inference_steps=STEPS) as handle:
            assert torch.equal(any_subject.generate(**changes), expected)
        assert handle.stats.reused > 0
    assert torch.equal(any_subject.generate(), any_subject.full_run)


def test_every_nth_step_of_both_branches(wan: Subject) -> None:
    block = wan.network.blocks[0]
    with (
        WIDE.attach(wan.pipe, 2, num_inference_steps=STEPS) as handle,
        count(block.attn1.to_q) as own,
        count(block.attn2.to_q) as cross,
    ):
        wan.generate()
    assert len(own) == 2 * 4  # steps 0, 2, 4, 6
    assert len(cross) == 2 * 2  # steps 0 and 6
    assert handle.stats == BaselineStats("attention layers", 4 * (8 + 4), 4 * (32 - 12))


def test_published_settings_of_opensora(opensora: Subject) -> None:
    spatial, temporal = opensora.network.spatial_blocks[0], opensora.network.temporal_blocks[0]
    with (
        WIDE.attach(opensora.pipe, 2, num_inference_steps=STEPS) as handle,
        count(spatial.attn.qkv) as space,
        count(temporal.attn.qkv) as time,
        count(spatial.cross_attn.proj) as cross,
        count(temporal.cross_attn.proj) as again,
    ):
        opensora.generate()
    assert len(space) == 4  # steps 0, 2, 4, 6
    assert len(time) == 2  # steps 0 and 4
    assert len(cross) == len(again) == 2  # steps 0 and 6
    assert handle.stats == BaselineStats("attention layers", 2 * (4 + 2 + 2 + 2), 2 * (4 * 8 - 10))
    config = PAB().config(opensora.pipe, 2, STEPS)
    assert config.temporal_attention_timestep_skip_range == (450, 930)


def test_a_branch_never_gets_the_attention_of_the_other(wan: Subject) -> None:
    """With equal prompts guidance is nothing, so that both branches are the unguided run."""
    prompt = "a red circle moving left"
    with WIDE.attach(wan.pipe, 2, num_inference_steps=STEPS):
        alone = wan.generate(guidance_scale=1.0)
        both = wan.generate(negative_prompt=prompt, prompt=prompt)
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-4)


def test_interval_of_one_changes_nothing(subject: Subject) -> None:
    with WIDE.attach(subject.pipe, 1, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)
