"""``check``: what is run, what it is compared with, and pipelines that have changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from ertacache.calibration.check import check
from ertacache.calibration.session import HELDOUT_SEED, Session
from ertacache.calibration.solve import solve
from ertacache.calibration.validate import validate
from ertacache.cli.check import quantize
from ertacache.cli.loading import load_lora
from ertacache.formats.fitted import ValidationRow
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.attach import find_handle
from ertacache.integration.solve import PlanSolver
from ertacache.models import load_pipeline
from tests.calibration.conftest import (
    CALL,
    HELDOUT,
    TINY_HELDOUT,
    TINY_PROMPTS,
    TINY_STEPS,
    counting_rows,
    tiny_call,
)
from tests.integration.tiny import CASES

HALF = TINY_STEPS // 2


@pytest.fixture(scope="module")
def policy(tiny_known: Policy) -> Policy:
    """Two plans, the second of them measured."""
    found = solve(solve(tiny_known, compute_steps=HALF), compute_steps=3)
    rows = (ValidationRow("policy", 3, psnr=41.0, speedup=2.0, prompts=24),)
    first, second = found.plans
    return replace(found, plans=(first, replace(second, validation=rows)), unit_psnr=12.0)


def test_every_plan_against_the_file(tiny: Any, policy: Policy) -> None:
    with counting_rows(tiny.transformer) as rows:
        found = policy.check(tiny, TINY_HELDOUT, batch_size=2, **tiny_call())
    assert sum(rows) == 2 * (TINY_STEPS + HALF + 3)  # the full run is shared
    assert [plan.measured.computed_steps for plan in found.plans] == [HALF, 3]
    assert {plan.num_steps for plan in found.plans} == {TINY_STEPS}
    first, second = found.plans
    error = policy.plans[0].predicted_error
    assert error is not None
    assert (first.expected, first.source) == (PlanSolver(policy).psnr(error), "predicted")
    assert (second.expected, second.source) == (41.0, "measured")
    assert second.measured.prompts == 2
    assert second.measured.heldout
    assert second.note == ""
    assert find_handle(tiny) is None


def test_the_validation_of_calibrate_is_repeated(tiny: Any, tiny_known: Policy) -> None:
    """The same prompts, seeds and pipeline give what stands in the file: nothing is lost."""
    solved = solve(tiny_known, compute_steps=HALF)
    session = Session(tiny, tiny_call(), batch_size=2)
    runs = session.number_runs(TINY_HELDOUT, HELDOUT_SEED)
    plans = tuple(validate(session, solved, solved.plans, runs))
    policy = replace(solved, plans=plans)
    found = policy.check(tiny, TINY_HELDOUT, batch_size=2, **tiny_call())
    assert found.plans[0].lost == pytest.approx(0, abs=1e-6)
    assert found.plans[0].recommendation.startswith("keep the policy")


@pytest.mark.parametrize(("given", "computed"), [(2, [HALF]), ([2, 4.0, 2], [HALF, 2])])
def test_given_speedups(given: Any, computed: list[int], tiny: Any, policy: Policy) -> None:
    found = check(policy, tiny, TINY_HELDOUT, speedup=given, batch_size=2, **tiny_call())
    assert [plan.measured.computed_steps for plan in found.plans] == computed


def test_other_steps_are_predicted(tiny: Any, policy: Policy) -> None:
    call = tiny_call() | {"num_inference_steps": 6}
    (plan,) = policy.check(tiny, TINY_HELDOUT[:1], speedup=2, **call).plans
    assert (plan.num_steps, plan.measured.computed_steps, plan.source) == (6, 3, "predicted")


def test_the_calibrated_number_of_steps_is_the_default(tiny: Any, policy: Policy) -> None:
    call = {name: value for name, value in tiny_call().items() if name != "num_inference_steps"}
    (plan,) = policy.check(tiny, TINY_HELDOUT[:1], speedup=2, **call).plans
    assert plan.num_steps == TINY_STEPS


def test_calibration_prompts_are_marked(tiny: Any, policy: Policy) -> None:
    prompts = [TINY_HELDOUT[0], TINY_PROMPTS[0]]
    (plan,) = policy.check(tiny, prompts, speedup=2, batch_size=2, **tiny_call()).plans
    assert not plan.measured.heldout


def test_what_is_refused_before_anything_is_run(
    tiny: Any, policy: Policy, tiny_known: Policy
) -> None:
    other = CASES["wan"].build()
    with counting_rows(tiny.transformer) as rows, counting_rows(other.transformer) as others:
        with pytest.raises(PolicyError, match="calibrated for another pipeline"):
            policy.check(other, TINY_HELDOUT)
        with pytest.raises(PolicyError, match="holds no plan yet: give a speed-up"):
            tiny_known.check(tiny, TINY_HELDOUT, **tiny_call())
        with pytest.raises(ValueError, match="at least one speedup"):
            policy.check(tiny, TINY_HELDOUT, speedup=[], **tiny_call())
        with pytest.raises(ValueError, match="speedup must be a finite number"):
            policy.check(tiny, TINY_HELDOUT, speedup=0.5, **tiny_call())
        with pytest.raises(ValueError, match="at least one string"):
            policy.check(tiny, [], **tiny_call())
    assert rows == others == []


def test_a_policy_without_a_psnr(tiny: Any, policy: Policy) -> None:
    bare = Policy(policy.fingerprint, plans=(replace(policy.plans[0], predicted_error=None),))
    (plan,) = bare.check(tiny, TINY_HELDOUT[:1], **tiny_call()).plans
    assert (plan.expected, plan.lost, plan.failed) == (None, None, False)


def test_no_step_reused(tiny: Any, policy: Policy) -> None:
    (plan,) = policy.check(tiny, TINY_HELDOUT[:1], speedup=1, **tiny_call()).plans
    assert plan.measured.computed_steps == plan.num_steps == TINY_STEPS
    assert "no step is reused" in plan.recommendation


def test_changed_weights_lose(known: Policy, pipe: Any) -> None:
    """Weights that were shuffled follow no trajectory that the policy knows."""
    policy = replace(solve(known, compute_steps=6), unit_psnr=12.0)
    call = CALL | {"height": 32, "width": 32}
    (home,) = policy.check(pipe, HELDOUT[:1], **call).plans
    changed = load_pipeline("emoji-flux")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in changed.transformer.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise, alpha=0.5 * weight.std().nan_to_num().item())
    measured = replace(policy.default, validation=(replace(home.measured, psnr=70.0),))
    found = replace(policy, plans=(measured,)).check(changed, HELDOUT[:1], **call)
    assert found.plans[0].measured.psnr < home.measured.psnr
    assert found.failed


def test_bfloat16_and_guidance_are_warned_of(policy: Policy) -> None:
    pipe = CASES["flux"].build().to(torch.bfloat16)
    call = tiny_call() | {"guidance_scale": 9.0}
    with pytest.warns(UserWarning, match="other conditions") as caught:
        found = policy.check(pipe, TINY_HELDOUT[:1], speedup=2, **call)
    words = " ".join(str(each.message) for each in caught)
    assert "dtype is 'bfloat16', was 'float32'" in words
    assert "guidance_scale is 9.0" in words
    note = "those are of float32, and the rounding of bfloat16, which no policy can undo, may"
    assert found.plans[0].note.startswith(note)
    assert found.plans[0].measured.computed_steps == HALF


def test_int8_weights(policy: Policy) -> None:
    pytest.importorskip("torchao")
    pipe = CASES["flux"].build()
    quantize(pipe)
    kinds = {type(weight).__name__ for weight in pipe.transformer.parameters()}
    assert "Int8Tensor" in kinds
    (plan,) = policy.check(pipe, TINY_HELDOUT[:1], speedup=2, **tiny_call()).plans
    assert plan.measured.computed_steps == HALF


def test_a_lora(policy: Policy, tmp_path: Path) -> None:
    torch.manual_seed(5)
    pipe = CASES["flux"].build()
    layers = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.transformer.add_adapter(layers)
    pipe.save_lora_weights(tmp_path, get_peft_model_state_dict(pipe.transformer))
    (file,) = tmp_path.iterdir()
    for place in (tmp_path, file):
        changed = CASES["flux"].build()
        load_lora(changed, str(place))
        assert changed.get_active_adapters()
        (plan,) = policy.check(changed, TINY_HELDOUT[:1], speedup=2, **tiny_call()).plans
        assert plan.measured.computed_steps == HALF
    file.rename(tmp_path / "weights.bin")
    with pytest.raises(ValueError, match="cannot load the LoRA"):
        load_lora(CASES["flux"].build(), str(tmp_path))
