"""TeaCache: which steps a known input reuses, and the polynomial."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from ertacache.baselines import BASELINES, BaselineStats, NotApplicableError, teacache
from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, attach_blocks
from ertacache.baselines.teacache import (
    PUBLISHED,
    Signal,
    TeaCache,
    TeaCacheRule,
    evaluate,
    fit_polynomial,
)
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.toy import Double

IDENTITY = (1.0, 0.0)
ALL = (range(BLOCKS),)


def steps_reused(rule: TeaCacheRule, signals: list[float], branch: int = 0) -> list[int]:
    block = Double()
    decisions = [
        rule.decide(BlockCall(k, branch, block, {}), torch.tensor([signal]))
        for k, signal in enumerate(signals)
    ]
    assert set(decisions) <= {Decision(reuse=ALL), Decision(record=ALL)}
    return [k for k, decision in enumerate(decisions) if decision.reuse]


def test_change_is_added_up_until_the_threshold() -> None:
    # Relative changes 0.5, 0.5, 0.5, 0.5, 0.5, ...: two fit under 1.2, the third does not.
    signals = [1.0, 1.5, 2.25, 3.375, 5.0625, 7.59375, 11.390625, 17.0859375]
    assert steps_reused(TeaCacheRule(IDENTITY, 1.2, 8, BLOCKS), signals) == [1, 2, 4, 5]
    # Not strictly below: 0.5 + 0.5 is not under 1.
    assert steps_reused(TeaCacheRule(IDENTITY, 1.0, 8, BLOCKS), signals) == [1, 3, 5]
    # The polynomial rescales: 2 x makes it 1 at once.
    assert steps_reused(TeaCacheRule((2.0, 0.0), 1.2, 8, BLOCKS), signals) == [1, 3, 5]


def test_first_and_last_step_are_always_computed() -> None:
    assert steps_reused(TeaCacheRule(IDENTITY, 100.0, 4, BLOCKS), [1.0] * 4) == [1, 2]


def test_branches_are_kept_apart() -> None:
    rule = TeaCacheRule(IDENTITY, 1.2, 8, BLOCKS)
    block = Double()
    reused = {0: [], 1: []}
    for k in range(6):
        for branch, base in ((0, 1.5), (1, 3.0)):
            signal = torch.tensor([base**k])
            if rule.decide(BlockCall(k, branch, block, {}), signal).reuse:
                reused[branch].append(k)
    assert reused == {0: [1, 2, 4, 5], 1: []}  # a change of 2 is never below 1.2


def test_runs_do_not_share_a_state(flux: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TeaCacheRule] = []

    class Counted(TeaCacheRule):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(teacache, "TeaCacheRule", Counted)
    baseline = TeaCache(polynomial=(0.0, 0.0))  # no change counts
    with baseline.attach(flux.pipe, 0.5, num_inference_steps=STEPS) as handle:
        flux.generate()
        once = handle.stats
        flux.generate()
    assert len(made) == 2
    assert handle.stats.computed == 2 * once.computed
    assert handle.stats.reused == 2 * once.reused > 0


def test_fit_finds_a_known_polynomial() -> None:
    truth = (3.0, -2.0, 0.5, 0.25, -0.125)
    x = [k / 10 for k in range(12)]
    found = fit_polynomial(x, [evaluate(truth, value) for value in x])
    assert found == pytest.approx(truth, abs=1e-8)
    assert evaluate(fit_polynomial([0.5], [2.0]), 0.5) == pytest.approx(2.0)


def test_only_ends_are_computed_under_a_huge_threshold(any_subject: Subject) -> None:
    baseline = TeaCache().calibrate(any_subject.pipe, any_subject.runs)
    assert len(baseline.polynomial) == 5
    with baseline.attach(any_subject.pipe, 100.0, num_inference_steps=STEPS) as handle:
        assert not torch.equal(any_subject.generate(), any_subject.full_run)
    calls = BLOCKS * any_subject.branches
    assert handle.stats == BaselineStats("blocks", 2 * calls, (STEPS - 2) * calls)
    assert torch.equal(any_subject.generate(), any_subject.full_run)


def test_nothing_is_reused_under_a_tiny_threshold(subject: Subject) -> None:
    baseline = TeaCache(polynomial=(0.0, 1.0))  # every change counts as 1
    with baseline.attach(subject.pipe, 0.5, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.full_run)


def test_published_checkpoint_needs_no_calibration(flux: Subject) -> None:
    config = flux.network.config
    with pytest.raises(ValueError, match="no polynomial for this checkpoint: calibrate"):
        TeaCache().attach(flux.pipe, 0.25, num_inference_steps=STEPS)
    flux.network.register_to_config(_name_or_path="black-forest-labs/FLUX.1-dev")
    try:
        assert TeaCache().calibrate(flux.pipe, pytest.fail).polynomial == PUBLISHED["FLUX.1"]
        with TeaCache().attach(flux.pipe, 0.25, num_inference_steps=STEPS):
            flux.generate()
    finally:
        flux.network._internal_dict = config


def test_unknown_modulation_is_named(sd3: Subject) -> None:
    reason = BASELINES["TeaCache"].applies(sd3.pipe)
    assert reason == "TeaCache has no rule for the modulated input of JointTransformerBlock"
    with pytest.raises(NotApplicableError, match="JointTransformerBlock"):
        TeaCache(polynomial=IDENTITY).attach(sd3.pipe, 0.1, num_inference_steps=STEPS)


def test_opensora_is_watched_at_what_its_first_attention_is_given(opensora: Subject) -> None:
    seen: list[torch.Tensor] = []
    layer = opensora.network.spatial_blocks[0].attn
    hook = layer.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    with ExitStack() as undo:
        signal, found = Signal(opensora.network, undo), list[torch.Tensor]()

        def look(call: BlockCall) -> Decision:
            found.append(signal(call).flatten(0, 1))
            return Decision()

        undo.enter_context(attach_blocks(opensora.pipe, lambda: BlockRun(look)))
        opensora.generate()
    hook.remove()
    assert len(found) == STEPS
    for one, other in zip(found, seen, strict=True):
        assert torch.equal(one, other)
