from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.calibration import calibrate, pays
from ertacache.calibration.profiling import generators, number_runs
from ertacache.calibration.refining import Reference, collect_reference, refine
from ertacache.calibration.solving import make_policy, solve
from ertacache.core.flows import rmse
from ertacache.core.solve import Fit, fit_plans
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile
from ertacache.integration import attach, record_run
from ertacache.integration.refit import RefitTask, refit_run
from tests.calibration.conftest import CALL, HELDOUT, PROMPTS, STEPS


@pytest.fixture(scope="module")
def reference(pipe: Any) -> Reference:
    return collect_reference(pipe, number_runs(PROMPTS), [], batch_size=6, call=CALL)


def heldout_error(pipe: Any, policy: Policy) -> float:
    runs = number_runs(HELDOUT, seed=50)
    call = CALL | {"prompt": HELDOUT}
    full, _ = record_run(pipe, generator=generators(runs), **call)
    with attach(pipe, policy):
        fast = pipe(generator=generators(runs), output_type="latent", **call)[0]
    return rmse(fast, full.latents[-1])


def test_the_refit_is_kept_only_if_it_helps(
    pipe: Any, known: Profile, reference: Reference
) -> None:
    solved = solve(known, speedup=4.0)
    refined = refine(pipe, solved, known, reference=reference, call=CALL)
    assert len(refined.compute_steps) == 4
    assert heldout_error(pipe, refined) <= 1.02 * heldout_error(pipe, solved)


def test_a_poor_schedule_is_replaced(pipe: Any, known: Profile, reference: Reference) -> None:
    poor, good = (
        make_policy(
            known,
            fit_plans(known.statistics, known.nominal, schedules=[steps], fit=Fit())[0],
        )
        for steps in ((0, 1, 2, 3), (0, 5, 10, 15))
    )
    refined = refine(pipe, poor, known, reference=reference, call=CALL)
    assert refined.compute_steps == good.compute_steps
    assert heldout_error(pipe, refined) < 0.5 * heldout_error(pipe, poor)


def test_prompts_that_are_not_fitted_on_run_along(
    pipe: Any, known: Profile, reference: Reference
) -> None:
    policy = solve(known, speedup=4.0)
    results = []
    for fitted in (None, 3):
        task = RefitTask(reference.latents, known.nominal, Fit(), fitted)
        call = CALL | reference.arguments(slice(None))
        results.append(refit_run(pipe, policy, task=task, call=call))
    (whole, _), (half, error) = results
    assert not torch.equal(whole.outputs, half.outputs)
    with attach(pipe, replace(policy, plan=half)):
        call = CALL | reference.arguments(slice(3, None))
        final = pipe(output_type="latent", **call)[0]
    assert rmse(final, reference.latents[-1][3:]) == pytest.approx(error, rel=1e-3)


def test_reference_latents_are_taken_from_what_was_kept(pipe: Any, reference: Reference) -> None:
    runs = number_runs(PROMPTS)
    kept, _ = record_run(pipe, prompt=PROMPTS[:2], generator=generators(runs[:2]), **CALL)
    some = collect_reference(pipe, runs[:3], [(runs[:2], kept)], batch_size=1, call=CALL)
    assert torch.equal(some.latents[-1][:2], kept.latents[-1])
    assert len(some.latents) == STEPS + 1
    assert torch.allclose(some.latents[-1], reference.latents[-1][:3], atol=1e-3)


def test_from_end_to_end(pipe: Any, tmp_path: Path) -> None:
    stages: list[str] = []

    def stage(name: str) -> None:
        stages.append(name)

    noise = torch.Generator().manual_seed(3)
    before = pipe(HELDOUT[0], generator=noise, output_type="pt", **CALL)[0]
    policy = calibrate(
        pipe,
        PROMPTS,
        heldout=HELDOUT,
        speedup=2.0,
        batch_size=4,
        stage=stage,
        profile_path=tmp_path / "profile.safetensors",
        **CALL,
    )
    after = pipe(HELDOUT[0], generator=noise.manual_seed(3), output_type="pt", **CALL)[0]
    assert torch.equal(before, after)  # nothing of ours is left on the pipeline
    assert stages == ["profile", "solve", "refit", "validate"]
    ours, plain, fewer = policy.validation
    assert [row.method for row in policy.validation] == ["policy", "plain reuse", "fewer steps"]
    assert {row.computed_steps for row in policy.validation} == {STEPS // 2}
    assert ours.psnr > max(plain.psnr, fewer.psnr) + 3
    assert ours.prompts == len(HELDOUT)
    policy.save(tmp_path / "policy.safetensors")
    assert Policy.load(tmp_path / "policy.safetensors").validation == policy.validation
    assert Profile.load(tmp_path / "profile.safetensors").num_prompts == len(PROMPTS)


def test_a_quarter_is_held_out_by_default(pipe: Any) -> None:
    short = CALL | {"num_inference_steps": 4}
    policy = calibrate(pipe, PROMPTS[:4], compute_steps=2, refit=False, batch_size=4, **short)
    assert policy.profile is not None
    assert policy.profile.num_prompts == 3
    assert policy.validation[0].prompts == 1


def row(method: str, psnr: float, speedup: float = 2.0) -> ValidationRow:
    return ValidationRow(method, 10, psnr=psnr, speedup=speedup, prompts=4)


def test_the_verdict() -> None:
    assert pays([row("policy", 40.0), row("fewer steps", 30.0)]) is None
    slow = pays([row("policy", 40.0, speedup=1.05), row("fewer steps", 30.0)])
    assert slow == "not worth it: the policy is 1.05 times as fast as the full run"
    worse = pays([row("policy", 29.0), row("plain reuse", 28.0), row("fewer steps", 30.0)])
    assert worse is not None
    assert worse == (
        "not worth it: fewer steps, which needs no calibration, is closer to the full run, 30.0 dB "
        "against 29.0"
    )
    near = pays([row("policy", 32.9), row("plain reuse", 30.0), row("fewer steps", 28.0)])
    assert near is not None
    assert "plain reuse, which needs no calibration, is nearly as close" in near
    other = pays([row("policy", 19.9), row("fewer steps", 15.0)])
    assert other is not None
    assert other.startswith(
        "not worth it: 10 computed steps give another picture, 19.9 dB to the full run at 2.00"
    )


@pytest.mark.parametrize("steps", [4, 8])
def test_a_few_steps_are_not_worth_it(
    pipe: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a distilled model, each of whose steps says something of its own."""

    def distilled(*, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        time.sleep(0.02)  # so that reuse is faster, and the picture decides
        return (6 * torch.sin(1000 * hidden_states),)

    monkeypatch.setattr(pipe.transformer, "forward", distilled)
    call = CALL | {"num_inference_steps": steps}
    policy = calibrate(pipe, PROMPTS[:3], heldout=HELDOUT[:2], speedup=2.0, batch_size=3, **call)
    verdict = pays(policy.validation)
    measured = policy.validation[0]
    assert measured.psnr < 16
    assert measured.speedup > 1.1
    assert verdict is not None
    figure = re.escape(f"{measured.psnr:.1f}")
    assert re.match(rf"not worth it: .*(another picture, {figure} dB|against {figure})", verdict)
