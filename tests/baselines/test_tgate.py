"""T-GATE: what is computed before and behind the gate, and where it does not apply."""

from __future__ import annotations

import pytest
import torch

from ertacache.baselines import BaselineStats, NotApplicableError
from ertacache.baselines.tgate import TGate
from tests.baselines.cases import BLOCKS, STEPS, Subject, count


def test_steps_of_every_part(wan: Subject) -> None:
    block = wan.network.blocks[0]
    with (
        TGate().attach(wan.pipe, 4, num_inference_steps=STEPS) as handle,
        count(block.attn1.to_q) as own,
        count(block.attn2.to_q) as cross,
        count(block.ffn) as ffn,
    ):
        assert not torch.equal(wan.generate(), wan.full_run)
    # Both branches on steps 0 to 3, one on 4 to 7.
    assert len(ffn) == 2 * 4 + 4
    # Self-attention on steps 0, 1, 2 of both branches, and on 4 to 7 of one.
    assert len(own) == 2 * 3 + 4
    # Cross-attention before the gate only.
    assert len(cross) == 2 * 4
    computed, total = (len(own) + len(cross)) * BLOCKS, 4 * STEPS * BLOCKS
    assert handle.stats == BaselineStats("attention layers", computed, total - computed)
    assert torch.equal(wan.generate(), wan.full_run)


def test_gate_at_the_end_without_intervals_changes_nothing(wan: Subject) -> None:
    with TGate(sp_interval=1).attach(wan.pipe, STEPS, num_inference_steps=STEPS):
        assert torch.equal(wan.generate(), wan.full_run)


def test_guidance_is_dropped_behind_the_gate(wan: Subject) -> None:
    seen: list[torch.Tensor] = []
    step = wan.pipe.scheduler.step
    with TGate().attach(wan.pipe, 1, num_inference_steps=STEPS):
        attached = wan.pipe.scheduler.step
        outputs: list[torch.Tensor] = []
        hook = wan.network.register_forward_hook(lambda m, a, o: outputs.append(o[0]))

        def watch(v: torch.Tensor, *args: object, **kwargs: object) -> object:
            seen.append(v)
            return attached(v, *args, **kwargs)

        wan.pipe.scheduler.step = watch
        wan.generate()
        wan.pipe.scheduler.step = attached
        hook.remove()
    assert step == wan.pipe.scheduler.step
    assert not torch.equal(outputs[0], outputs[1])
    for k in range(1, STEPS):
        assert torch.equal(outputs[2 * k], outputs[2 * k + 1])
        assert torch.equal(seen[k], outputs[2 * k])


def test_cross_attention_behind_the_gate_is_the_mean_of_both_branches(wan: Subject) -> None:
    layer, seen = wan.network.blocks[0].attn2, list[torch.Tensor]()
    with TGate().attach(wan.pipe, 1, num_inference_steps=STEPS):
        hook = layer.register_forward_hook(lambda m, a, o: seen.append(o))
        wan.generate()
        hook.remove()
    assert len(seen) == 2 + STEPS - 1
    for output in seen[2:]:
        torch.testing.assert_close(output, (seen[0] + seen[1]) / 2)


def test_without_guidance_there_is_one_branch(wan: Subject) -> None:
    with (
        TGate().attach(wan.pipe, 4, num_inference_steps=STEPS),
        count(wan.network.blocks[0].attn2.to_q) as cross,
    ):
        wan.generate(guidance_scale=1.0)
    assert len(cross) == 4


def test_branches_in_one_batch(opensora: Subject) -> None:
    """Behind the gate the network sees the half with the text, and guidance finds it twice."""
    sizes: list[int] = []
    outputs: list[torch.Tensor] = []
    crosses: list[torch.Tensor] = []
    block = opensora.network.spatial_blocks[0]
    with TGate(sp_interval=1).attach(opensora.pipe, 3, num_inference_steps=STEPS) as handle:
        hooks = [
            block.mlp.register_forward_hook(lambda m, a, o: sizes.append(len(o))),
            block.cross_attn.register_forward_hook(lambda m, a, o: crosses.append(o)),
            opensora.network.register_forward_hook(lambda m, a, o: outputs.append(o[0])),
        ]
        opensora.generate()
        for hook in hooks:
            hook.remove()
    assert sizes == [2] * 3 + [1] * (STEPS - 3)
    for k, output in enumerate(outputs):
        text, empty = output.chunk(2)
        assert torch.equal(text, empty) == (k >= 3)
    torch.testing.assert_close(crosses[3], crosses[2].mean(0, keepdim=True))
    assert handle.stats.reused == BLOCKS * (STEPS - 3)
    # The kept half is the prompt's: another negative prompt changes nothing behind the gate.
    network, given = opensora.network, list[torch.Tensor]()
    hook = network.y_embedder.register_forward_hook(lambda m, a, o: given.append(a[0]))
    with TGate().attach(opensora.pipe, 1, num_inference_steps=STEPS):
        opensora.generate()
    hook.remove()
    assert torch.equal(given[1], given[0][:1])


@pytest.mark.parametrize(
    ("name", "block"), [("flux", "FluxTransformerBlock"), ("cogvideox", "CogVideoXBlock")]
)
def test_joint_attention_is_no_case_for_it(
    name: str, block: str, request: pytest.FixtureRequest
) -> None:
    subject: Subject = request.getfixturevalue(name)
    reason = TGate().applies(subject.pipe)
    assert reason == f"T-GATE caches cross-attention, but {block} attends to the text jointly"
    with pytest.raises(NotApplicableError, match=block):
        TGate().attach(subject.pipe, 4, num_inference_steps=STEPS)
