"""Calibration from end to end, its targets, and up to three budgets for a target PSNR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration.calibrate import SPEEDUPS, TRIES, Targets, calibrate
from ertacache.calibration.profile import profile
from ertacache.calibration.session import Session
from ertacache.calibration.validate import missed_target, recommend
from ertacache.core.frontier import MeasuredFit
from ertacache.core.plans import Target, TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.fitted import FittedPlan, ValidationRow
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.solve import PlanSolver, predicted_psnr, profile_of, with_frontier
from ertacache.metrics.image import to_image
from tests.calibration.conftest import (
    CALL,
    HELDOUT,
    PROMPTS,
    STEPS,
    TINY_HELDOUT,
    TINY_PROMPTS,
    TINY_RUNS,
    TINY_STEPS,
    counting_rows,
    tiny_call,
)
from tests.integration.sampling import Field
from tests.integration.tiny import CASES, generate

UNIT = 20.0
SHORT = tiny_call() | {"num_inference_steps": 4}


def computed(policy: Policy) -> list[int]:
    return [len(plan.compute_steps) for plan in policy.plans]


def test_calibrate_with_a_generator(tiny: Any) -> None:
    """One line that names the argument and the remedy, before any run."""
    with counting_rows(tiny.transformer) as rows:
        for run in (calibrate, profile):
            with pytest.raises(ValueError, match=r"^generator is set for every prompt: .* seed="):
                run(tiny, TINY_PROMPTS, generator=torch.Generator(), **SHORT)
    assert rows == []


class Decoding:
    """A pipeline that returns images in a form of its own, whatever it is asked for."""

    def __init__(self, pipe: Any, form: Callable[[torch.Tensor], Any]) -> None:
        self._pipe, self._form = pipe, form

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __call__(self, **call: Any) -> Any:
        images = self._pipe(**call | {"output_type": "pt"})[0]
        return self._form(images)


def test_a_pipeline_that_returns_a_list_of_images(tiny: Any) -> None:
    """Calibrated as with tensors, but for 8 bits of rounding; also as the first output."""
    pipe = Decoding(tiny, lambda images: [to_image(image) for image in images])
    call = {"heldout": TINY_HELDOUT[:1], "compute_steps": 2, "refit_prompts": 2} | SHORT
    expected, found = (calibrate(each, TINY_PROMPTS[:2], **call) for each in (tiny, pipe))
    assert torch.equal(coefficients(found), coefficients(expected))
    rows = zip(found.default.validation, expected.default.validation, strict=True)
    assert all(ours.psnr == pytest.approx(theirs.psnr, abs=0.5) for ours, theirs in rows)
    exact, bare = (Session(each, SHORT).generate(TINY_RUNS[:2]).results for each in (tiny, pipe))
    wrapped = Decoding(tiny, lambda images: ([to_image(image) for image in images],))
    assert torch.equal(Session(wrapped, SHORT).generate(TINY_RUNS[:2]).results, bare)
    torch.testing.assert_close(bare, exact, rtol=0, atol=0.5 / 255 + 1e-6)


class PlainLoop:
    """A loop of a few lines, which takes one prompt and one generator."""

    def __init__(self, pipe: Any) -> None:
        self.unet, self.scheduler = Field(), pipe.scheduler

    @torch.no_grad()
    def __call__(
        self, prompt: str, generator: torch.Generator, num_inference_steps: int, **_: Any
    ) -> tuple[torch.Tensor]:
        assert prompt.startswith("a ")
        self.scheduler.set_timesteps(num_inference_steps)
        x = torch.randn(1, 3, 4, 4, generator=generator)
        for t in self.scheduler.timesteps:
            x = self.scheduler.step(self.unet(x, t), t, x).prev_sample
        return (x.sigmoid(),)


def test_a_plain_loop_that_takes_one_prompt_and_one_generator(tiny: Any) -> None:
    pipe = PlainLoop(tiny)
    call = {"compute_steps": 3, "refit": False, "num_inference_steps": 6}
    policy = calibrate(pipe, TINY_PROMPTS[:4], **call)
    assert profile_of(policy).num_runs == 3
    assert policy.default.validation[0].heldout


def test_from_end_to_end(pipe: Any, tmp_path: Path, clock: Callable[[], None]) -> None:
    stages: list[str] = []

    def stage(name: str) -> None:
        stages.append(name)

    noise = torch.Generator().manual_seed(3)
    before = pipe(HELDOUT[0], generator=noise, output_type="pt", **CALL)[0]
    hook = pipe.transformer.proj_out.register_forward_hook(clock)
    policy = calibrate(
        pipe,
        PROMPTS,
        heldout=HELDOUT,
        batch_size=4,
        refit_prompts=2,
        stage=stage,
        profile_path=tmp_path / "profile.safetensors",
        **CALL,
    )
    hook.remove()
    after = pipe(HELDOUT[0], generator=noise.manual_seed(3), output_type="pt", **CALL)[0]
    assert torch.equal(before, after)  # nothing of ours is left on the pipeline
    assert stages == ["profile", "trial", "refit", "refit", "validate"]
    assert computed(policy) == [STEPS // 2, STEPS // 3]
    for plan, speedup, ahead in zip(policy.plans, SPEEDUPS, (3.0, 2.0), strict=True):
        ours, plain, fewer = plan.validation
        methods = [row.method for row in plan.validation]
        assert methods == ["policy", "plain reuse", "fewer steps"]
        assert {row.computed_steps for row in plan.validation} == {len(plan.compute_steps)}
        assert {row.speedup for row in plan.validation} == {speedup}  # only the network takes time
        assert ours.psnr > max(plain.psnr, fewer.psnr) + ahead
        assert ours.prompts == len(HELDOUT)
        assert plan.measured == ours
        assert plan.target_psnr is None
    assert [fit.computed for fit in policy.fits] == [2, 4, 6, 8]
    assert policy.unit_psnr is not None
    assert len(policy.frontier) == STEPS - 1
    assert profile_of(policy).num_runs == len(PROMPTS)
    policy.save(tmp_path / "policy.safetensors")
    loaded = Policy.load(tmp_path / "policy.safetensors")
    assert [plan.validation for plan in loaded.plans] == [p.validation for p in policy.plans]
    assert (loaded.fits, loaded.frontier) == (policy.fits, policy.frontier)
    bare = Policy.load(tmp_path / "profile.safetensors")
    assert (profile_of(bare).num_runs, bare.plans, bare.fits) == (len(PROMPTS), (), ())


def test_a_quarter_is_held_out_by_default(tiny: Any) -> None:
    call = {"compute_steps": 2, "refit": False, "batch_size": 4} | SHORT
    policy = calibrate(tiny, TINY_PROMPTS[:4], **call)
    assert profile_of(policy).num_runs == 3
    assert policy.default.validation[0].prompts == 1
    assert policy.default.validation[0].heldout
    repeated = calibrate(tiny, [*TINY_PROMPTS[:2], TINY_PROMPTS[1]], **call)
    assert prompts_of(repeated) == TINY_PROMPTS[:1]  # what is there twice is held out twice
    assert repeated.default.validation[0].prompts == 1


def prompts_of(policy: Policy) -> list[str]:
    return [run.prompt for run in profile_of(policy).runs]


SOLVED = {"compute_steps": 2, "refit": False} | SHORT


def test_calibrate_with_a_profile_of_the_same_prompts(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are held out leave the fit, not the file; the others are not run again."""
    path, prompts = tmp_path / "profile.safetensors", TINY_PROMPTS[:4]
    profile(tiny, prompts, path=path, **SHORT)
    before = path.read_bytes()
    with counting_rows(tiny.transformer) as rows, caplog.at_level("INFO", logger="ertacache"):
        policy = calibrate(tiny, prompts, profile_path=path, **SOLVED)
        assert sum(rows) == 4 + 3 * 2  # one prompt, validated in four variants
    assert prompts_of(policy) == TINY_PROMPTS[:3]
    assert all(row.heldout for row in policy.default.validation)
    assert [line for line in caplog.messages if "left out" in line] == [
        "1 of 4 profiled runs are of prompts to validate on, and are left out of the fit"
    ]
    assert path.read_bytes() == before
    fresh = calibrate(tiny, prompts, **SOLVED)
    assert policy.frontier == fresh.frontier
    assert torch.equal(coefficients(policy), coefficients(fresh))


def coefficients(policy: Policy) -> torch.Tensor:
    plan = policy.default.plan
    assert isinstance(plan, TrajectoryPlan)
    return plan.coefficients


def test_fits_that_were_made_from_what_is_held_out_are_dropped(
    tiny: Any, ready: Policy, tmp_path: Path
) -> None:
    path = tmp_path / "profile.safetensors"
    fits = (MeasuredFit(4, Fit(ridge=0.1), 0.5),)
    replace(ready, fits=fits).save(path)
    call = tiny_call() | {"compute_steps": 4, "refit": False, "profile_path": path}
    kept = calibrate(tiny, TINY_PROMPTS, heldout=TINY_HELDOUT[:1], **call)
    assert (kept.fits, kept.unit_psnr) == (fits, UNIT)
    dropped = calibrate(tiny, TINY_PROMPTS, **call)
    assert (dropped.fits, dropped.unit_psnr) == ((), None)
    assert prompts_of(dropped) == TINY_PROMPTS[:4]


def test_heldout_that_overlaps_the_prompts(tiny: Any) -> None:
    """The prompts to validate on win; the others keep their seeds."""
    heldout = [TINY_PROMPTS[1], TINY_HELDOUT[0]]
    with pytest.warns(UserWarning, match="1 of 3 calibration prompts are to be validated on, too"):
        policy = calibrate(tiny, TINY_PROMPTS[:3], heldout=heldout, **SOLVED)
    found = [(run.prompt, run.seed) for run in profile_of(policy).runs]
    assert found == [(TINY_PROMPTS[0], 0), (TINY_PROMPTS[2], 2)]
    row = policy.default.validation[0]
    assert (row.prompts, row.heldout) == (2, True)


@pytest.mark.parametrize("heldout", [None, TINY_PROMPTS[:1], TINY_PROMPTS[:2]])
def test_a_single_prompt_is_not_held_out(
    tiny: Any, heldout: list[str] | None, tmp_path: Path
) -> None:
    """Nor is anything else where nothing would remain to calibrate on: it is said everywhere."""
    path = tmp_path / "policy.safetensors"
    with pytest.warns(UserWarning, match="marked as not held out: give more prompts"):
        policy = calibrate(tiny, TINY_PROMPTS[:1], heldout=heldout, **SOLVED)
    assert prompts_of(policy) == TINY_PROMPTS[:1]
    policy.save(path)
    rows = Policy.load(path).default.validation
    assert [row.heldout for row in rows] == [False] * 3
    words = f"measured on {len(heldout or [0])} calibration prompt"
    assert words in str(policy)
    assert str(recommend(rows)).endswith("with other seeds, not held out")


def test_without_a_refit_nothing_is_tried(tiny: Any) -> None:
    """Plans are solved from the profile, with ridges chosen by leaving prompts out."""
    call = {"heldout": TINY_HELDOUT[:1], "refit": False, "batch_size": 3} | tiny_call()
    policy = calibrate(tiny, TINY_PROMPTS[:3], **call)
    assert computed(policy) == [4, 2]  # of 2x and 3x
    assert (policy.fits, policy.unit_psnr) == ((), None)
    assert len(policy.frontier) == TINY_STEPS - 1
    assert [plan.measured_error for plan in policy.plans] == [None, None]
    for plan in policy.plans:
        known = policy.frontier[len(plan.compute_steps) - 2]
        assert plan.compute_steps == known.compute_steps
        assert plan.predicted_error == known.predicted_error
    assert "trial 0 + refit 0" in policy.provenance["network calls"]


def test_a_list_of_speedups(tiny: Any) -> None:
    call = {"heldout": TINY_HELDOUT[:1], "refit": False, "batch_size": 3} | tiny_call()
    policy = calibrate(tiny, TINY_PROMPTS[:3], speedup=[4, 1.5, 3, 2.1], **call)
    assert computed(policy) == [2, 5, 3]  # 3x is two of eight steps, too, and stands once
    assert [plan.measured is not None for plan in policy.plans] == [True] * 3
    listed = calibrate(tiny, TINY_PROMPTS[:3], compute_steps=[5, 3], **call)
    assert computed(listed) == [5, 3]
    with attach(tiny, policy, speedup=1.5) as handle:
        tiny("a circle", output_type="latent", **tiny_call())
        assert handle.plan is policy.plans[1]


def test_targets_are_checked() -> None:
    of = Targets.of
    assert of("trajectory").budgets == of("paper").budgets
    assert of("trajectory").budgets == (Target(speedup=2.0), Target(speedup=3.0))
    assert of("trajectory", speedup=2) == of("trajectory", speedup=[2, 2.0])
    assert of("trajectory", compute_steps=5).budgets == (Target(compute_steps=5),)
    assert of("trajectory", min_psnr=40.0) == Targets(min_psnr=40.0)
    assert of("paper", threshold=0.1) == Targets(threshold=0.1, method="paper")
    assert of("trajectory", speedup=[2, 2.05, 3]).check(30) == [15, 14, 10]
    assert of("trajectory", speedup=[2, 2.4]).check(5) == [2]
    assert of("trajectory", min_psnr=40.0).check(30) == []


def test_default_targets_that_a_short_run_cannot_meet_are_left_out() -> None:
    default = Targets.of("trajectory")
    assert [default.check(steps) for steps in (30, 6, 5, 4)] == [[15, 10], [3, 2], [2], [2]]
    for steps in (1, 2, 3):
        with pytest.raises(ValueError, match="speedup must be between 1 and"):
            default.check(steps)
    with pytest.raises(ValueError, match="speedup must be between 1 and 2, got 3"):
        Targets.of("trajectory", speedup=[2.0, 3.0]).check(4)  # the same, but asked for


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ({"speedup": 2.0, "min_psnr": 40.0}, "one kind of target, not speedup and min_psnr"),
        ({"speedup": 2.0, "compute_steps": [3]}, "not speedup and compute_steps"),
        ({"speedup": 2.0, "threshold": 0.1, "method": "paper"}, "not speedup and threshold"),
        ({"speedup": []}, "at least one target"),
        ({"compute_steps": []}, "at least one target"),
        ({"speedup": [2.0, 0.9]}, "at least 1, got 0.9"),
        ({"speedup": [2.0, 5.0]}, "speedup must be between 1 and 4, got 5"),
        ({"compute_steps": [4, 1]}, "cannot compute 1 of 8 steps"),
        ({"compute_steps": 9}, "cannot compute 9 of 8 steps"),
        ({"min_psnr": float("nan")}, "finite number of dB"),
        ({"min_psnr": 40.0, "method": "paper"}, "predicts no error"),
        ({"threshold": 0.1}, "a threshold is the paper's"),
        ({"method": "other"}, "method must be 'trajectory' or 'paper'"),
        ({"refit_prompts": 0}, "refit_prompts must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"prompts": []}, "list of at least one"),
        ({"heldout": "a circle"}, "list of at least one"),
        ({"generator": torch.Generator()}, "generator is set for every prompt: .* give seed="),
        ({"latents": torch.zeros(1)}, "latents is set for every prompt: .* give seed="),
        ({"output_type": "pil"}, "output_type is set for every prompt: leave it out"),
        ({"prompt": "a circle"}, "prompt is set for every prompt: .* as the second argument"),
    ],
)
def test_arguments_are_checked_before_any_run(
    tiny: Any, targets: dict[str, Any], sentence: str
) -> None:
    call = tiny_call() | {"prompts": TINY_PROMPTS} | targets
    with counting_rows(tiny.transformer) as rows, pytest.raises(ValueError, match=sentence):
        calibrate(tiny, **call)
    assert rows == []


def test_steps_of_the_pipelines_own_are_checked_when_they_are_known(tiny: Any) -> None:
    """Here not by their number, but by their sigmas."""
    call = {name: value for name, value in SHORT.items() if name != "num_inference_steps"}
    given = call | {"sigmas": [1.0, 0.6, 0.3], "refit": False}
    with pytest.raises(ValueError, match=r"speedup must be between 1 and 1\.5, got 2"):
        calibrate(tiny, TINY_PROMPTS[:2], speedup=2.0, **given)


def test_prompts_over_a_list_of_guidance(tiny: Any) -> None:
    """One policy for the range, refitted on all values at once; the pipeline stays as it was."""
    before = generate(tiny, CASES["flux"])
    call = SHORT | {"guidance_scale": [2.0, 5.0], "batch_size": 4}
    policy = calibrate(tiny, TINY_PROMPTS[:4], heldout=TINY_HELDOUT, compute_steps=2, **call)
    assert torch.equal(generate(tiny, CASES["flux"]), before)
    values = [dict(run.arguments)["guidance_scale"] for run in profile_of(policy).runs]
    assert sorted(values) == [2.0, 2.0, 5.0, 5.0]
    assert policy.fingerprint.guidance["guidance_scale"] == (2.0, 5.0)
    assert computed(policy) == [2]
    assert policy.default.measured_error is not None
    assert policy.default.validation[0].prompts == len(TINY_HELDOUT)


def test_a_file_is_resumed_without_running_its_prompts_again(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    call = {"heldout": TINY_HELDOUT[:1], "compute_steps": 2, "refit": False} | SHORT
    with counting_rows(tiny.transformer) as rows:
        calibrate(tiny, TINY_PROMPTS[:2], profile_path=path, **call)
        validation = 4 + 3 * 2  # the full run, the plan, plain reuse and fewer steps
        assert sum(rows) == 2 * 4 + validation
        rows.clear()
        first = calibrate(tiny, TINY_PROMPTS[:2], profile_path=path, **call)
        assert sum(rows) == validation
        rows.clear()
        policy = calibrate(tiny, TINY_PROMPTS[:3], profile_path=path, **call)
        assert sum(rows) == 1 * 4 + validation
    assert [profile_of(each).num_runs for each in (first, policy)] == [2, 3]
    assert profile_of(Policy.load(path)).num_runs == 3


def test_a_psnr_is_reached_and_measured(pipe: Any) -> None:
    call = CALL | {"num_inference_steps": 10, "batch_size": 4, "refit": False}
    policy = calibrate(pipe, PROMPTS[:2], heldout=HELDOUT[:1], min_psnr=40.0, **call)
    (plan,) = policy.plans
    assert len(plan.compute_steps) < 10
    assert plan.validation[0].psnr >= 40
    assert missed_target(plan) is None
    assert plan.target_psnr == 40.0


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Measurements that are some decibels short of the prediction."""

    def script(short: float) -> list[int]:
        tried: list[int] = []

        def validate(
            session: Session, policy: Policy, plans: Sequence[FittedPlan], *_: Any
        ) -> list[FittedPlan]:
            (plan,) = plans
            tried.append(len(plan.compute_steps))
            assert plan.predicted_error is not None
            psnr = predicted_psnr(plan.predicted_error, UNIT) - short
            row = ValidationRow("policy", tried[-1], psnr=psnr, speedup=2.0, prompts=1)
            return [replace(plan, validation=(row,))]

        monkeypatch.setattr("ertacache.calibration.calibrate.validate", validate)
        return tried

    return script


@pytest.fixture(scope="module")
def ready(tiny_known: Policy) -> Policy:
    """With its frontier and a unit."""
    return replace(with_frontier(tiny_known), unit_psnr=UNIT)


@pytest.fixture
def reach(tiny: Any, ready: Policy, tmp_path: Path) -> Callable[[float], Policy]:
    """Calibrate for a PSNR, with a profile in a file, so that the pipeline is not run."""
    path = tmp_path / "profile.safetensors"
    ready.save(path)

    def calibrated(psnr: float) -> Policy:
        call = tiny_call() | {"refit": False, "profile_path": path}
        return calibrate(tiny, TINY_PROMPTS, heldout=TINY_HELDOUT[:1], min_psnr=psnr, **call)

    return calibrated


@pytest.fixture(scope="module")
def predicted(ready: Policy) -> list[float]:
    """The decibels that are predicted for two to seven computed steps."""
    curve = PlanSolver(ready).curve(profile_of(ready).schedule)
    return [predicted_psnr(error, UNIT) for n, error in curve.items() if n < TINY_STEPS]


def test_the_fewest_steps_that_are_predicted_are_tried_first(
    scripted: Any, reach: Callable[[float], Policy], predicted: list[float]
) -> None:
    tried = scripted(0.0)
    policy = reach(predicted[2])
    assert tried == computed(policy) == [2 + predicted.index(predicted[2])]
    assert missed_target(policy.default) is None
    assert policy.unit_psnr == UNIT


def test_a_try_that_misses_is_followed_by_another(
    scripted: Any, reach: Callable[[float], Policy], predicted: list[float]
) -> None:
    tried = scripted(0.5)
    policy = reach(predicted[2])
    assert missed_target(policy.default) is None
    assert tried == sorted(set(tried))
    assert len(tried) > 1
    assert policy.default.validation[0].computed_steps == tried[-1]
    assert policy.unit_psnr == pytest.approx(UNIT - 0.5)  # what was lacking, for all predictions


def test_a_psnr_out_of_reach_is_reported(
    scripted: Any, reach: Callable[[float], Policy], predicted: list[float]
) -> None:
    tried = scripted(0.0)
    policy = reach(200.0)
    assert 1 <= len(tried) <= TRIES
    assert max(tried) < TINY_STEPS  # computing every step is no plan
    sentence = missed_target(policy.default)
    assert sentence is not None
    assert sentence.startswith("target missed: 200.0 dB asked for, ")
    assert policy.default.validation[0].psnr == max(predicted)


def test_no_step_can_be_reused(tiny: Any) -> None:
    call = tiny_call() | {"num_inference_steps": 2, "refit": False}
    with pytest.raises(ValueError, match="a run of 2 steps leaves none to reuse"):
        calibrate(tiny, TINY_PROMPTS[:2], min_psnr=40.0, **call)
