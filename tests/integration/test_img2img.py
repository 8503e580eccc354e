"""Runs that begin later, as image to image does: plans solved from the profile of whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import (
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    StableDiffusion3Img2ImgPipeline,
    WanVideoToVideoPipeline,
)
from torch import Tensor

from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.attach import attach
from ertacache.integration.record import record
from tests.integration.reference import replayed
from tests.integration.rings import RingSampling
from tests.integration.sampling import DETERMINISTIC, STEPS, make
from tests.integration.setting import (
    Setting,
    count_calls,
    fitted_plan,
    make_setting,
    watch_steps,
)
from tests.integration.tiny import CASES, call_arguments, quiet

# Some schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array:DeprecationWarning"),
    pytest.mark.filterwarnings("error:the policy was calibrated"),
]


def profiled(sampling: RingSampling, **call: Any) -> Policy:
    return sampling.policy(profile=sampling.profile(**call))


@pytest.mark.parametrize("name", list(DETERMINISTIC))
@pytest.mark.parametrize("announced", [True, False])
def test_run_that_begins_late_follows_its_own_plan(name: str, announced: bool) -> None:
    """Bit for bit the reference loop with the plan for these steps, multistep or not."""
    sampling = RingSampling(make(name))
    if announced and not hasattr(sampling.scheduler, "set_begin_index"):
        pytest.skip("this scheduler has no begin index")
    policy, (run, _) = profiled(sampling), sampling.record()
    late = {"start": 4, "announced": announced, "latents": run.latents[4]}
    full = sampling(**late)
    with attach(sampling, policy, speedup=2.0) as handle:
        whole = sampling()
        assert handle.stats.last.computed_steps == 5
        with watch_steps(sampling) as seen:
            result = sampling(**late)
        assert (handle.stats.last.computed_steps, handle.stats.last.reused_steps) == (3, 3)
        assert torch.equal(result, replayed(handle.plan, seen)[-1])
        assert getattr(sampling.scheduler, "step_index", STEPS) == STEPS  # of the whole schedule
        assert torch.equal(sampling(), whole)
    assert torch.equal(sampling(**late), full)
    # Plain reuse of every second output, step by step as the scheduler takes them at first order.
    update = sampling.schedule(begin=4).nominal
    plain = fitted_plan(TrajectoryPlan((0, 2, 5), update[:, None]), sampling.schedule(begin=4))
    with attach(sampling, replace(policy, plans=(plain,))):
        reused = sampling(**late)
    assert (result - full).norm() < (reused - full).norm() / 2


@pytest.mark.parametrize("name", ["DDIMScheduler", "UniPCMultistepScheduler"])
def test_plan_that_was_fitted_for_a_late_begin(name: str) -> None:
    """Needs no profile, also if the pipeline does not announce where the run begins."""
    sampling = RingSampling(make(name))
    policy, (run, _) = profiled(sampling), sampling.record()
    late = {"start": 4, "latents": run.latents[4]}
    with attach(sampling, policy, compute_steps=3) as handle:
        expected = sampling(**late)
        assert handle.plan is not None
    with attach(sampling, Policy(policy.fingerprint, plans=(handle.plan,))) as handle:
        assert torch.equal(sampling(**late), expected)
        assert handle.stats.last.computed_steps == 3


@pytest.mark.parametrize("name", list(DETERMINISTIC))
def test_profile_of_late_runs(name: str) -> None:
    """Recorded with a strength, and followed with the same one."""
    sampling = RingSampling(make(name))
    run, _ = sampling.record()
    late = {"start": 4, "latents": run.latents[4]}
    full, policy = sampling(**late), profiled(sampling, **late)
    with attach(sampling, policy, compute_steps=3) as handle:
        result = sampling(**late)
        assert handle.plan is not None
        assert handle.plan.predicted_error is not None
    error = (result - full).square().mean().sqrt()
    assert error < 3 * handle.plan.predicted_error


def test_solved_once_for_every_begin(caplog: pytest.LogCaptureFixture) -> None:
    sampling = RingSampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = profiled(sampling)
    runs = [(3, True), (3, False), (6, True), (0, True), (3, True)]
    with (
        attach(sampling, policy, speedup=2.0) as handle,
        caplog.at_level("INFO", logger="ertacache"),
    ):
        results = [sampling(start=start, announced=announced) for start, announced in runs]
        assert handle.stats.runs == len(runs)
    computed = [message.split(": ")[1].split(" computed")[0] for message in caplog.messages]
    assert computed == ["3 of 7 steps", "2 of 4 steps", "5 of 10 steps"]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[4])


# Before the scheduler's shift, which is applied entry by entry.
SIGMAS = torch.linspace(1, 1 / 8, 8).tolist()


def test_last_entries_of_the_sigma_schedule(flux: Setting) -> None:
    """As image to image by hand: latents of the caller, and where on the schedule they are."""
    policy, call = flux.policy(profile=flux.profile()), {"sigmas": SIGMAS[2:]}
    start = flux.run.latents[2]
    with (
        attach(flux.pipe, policy, speedup=2.0) as handle,
        count_calls(flux.pipe.transformer) as calls,
    ):
        with watch_steps(flux.pipe) as seen:
            result = flux.generate(latents=start, **call)
        assert len(calls) == handle.stats.last.computed_steps == 3
        assert torch.equal(result, replayed(handle.plan, seen)[-1])
        flux.generate()
        assert handle.stats.last.computed_steps == 4
    full = flux.generate(latents=start, **call)
    torch.testing.assert_close(full, flux.run.latents[-1], rtol=0, atol=1e-4)


def flux_image_to_image(setting: Setting) -> tuple[Any, dict[str, Any]]:
    pipe = FluxImg2ImgPipeline(**setting.another().pipe.components)
    noise = torch.Generator().manual_seed(1)
    return quiet(pipe), {"image": torch.rand(1, 3, 32, 32, generator=noise)}


def wan_video_to_video(setting: Setting) -> tuple[Any, dict[str, Any]]:
    """With UniPC; it does not announce where a run begins."""
    parts = dict(setting.another().pipe.components)
    del parts["transformer_2"]
    noise = torch.Generator().manual_seed(1)
    frames = torch.rand(9, 3, 32, 32, generator=noise)
    return quiet(WanVideoToVideoPipeline(**parts)), {"video": list(frames), "num_frames": None}


@pytest.mark.parametrize(
    ("name", "build"), [("flux", flux_image_to_image), ("wan", wan_video_to_video)]
)
def test_image_to_image(name: str, build: Any, request: pytest.FixtureRequest) -> None:
    """From a profile of text to image, at several strengths, and nothing left behind."""
    setting: Setting = request.getfixturevalue(name)
    pipe, given = build(setting)

    def image_to_image(strength: float) -> Tensor:
        call = call_arguments(setting.case, seed=3, strength=strength, **given)
        result: Tensor = pipe(**{key: value for key, value in call.items() if value is not None})[0]
        return result

    policy = setting.policy(profile=setting.profile())
    full = {strength: image_to_image(strength) for strength in (0.75, 0.5, 1.0)}
    with (
        attach(pipe, policy, speedup=2.0) as handle,
        count_calls(pipe.transformer) as calls,
    ):
        for strength, steps in ((0.75, 6), (0.5, 4), (1.0, 8), (0.75, 6)):
            calls.clear()
            with watch_steps(pipe) as seen:
                result = image_to_image(strength)
            last = handle.stats.last
            assert (last.computed_steps, last.reused_steps) == (steps // 2, steps // 2)
            assert len(calls) == setting.branches * steps // 2
            assert torch.equal(result, replayed(handle.plan, seen)[-1])
            assert not torch.equal(result, full[strength])
    for strength, expected in full.items():
        assert torch.equal(image_to_image(strength), expected)


PARTS = {
    "flux": (FluxImg2ImgPipeline, FluxInpaintPipeline),
    "sd3": (StableDiffusion3Img2ImgPipeline,),
}


@pytest.mark.parametrize("name", list(PARTS))
def test_a_policy_on_image_to_image_and_inpainting(name: str) -> None:
    """Built from the parts of the calibrated pipeline; what matters is network and scheduler."""
    setting = make_setting(name)
    policy, noise = setting.policy(profile=setting.profile()), torch.Generator().manual_seed(1)
    given = {"image": torch.rand(1, 3, 32, 32, generator=noise)}
    mask = {"mask_image": torch.ones(1, 1, 32, 32)}
    parts = setting.pipe.components
    for kind in PARTS[name]:
        pipe = quiet(kind(**parts))
        call = given | (mask if "Inpaint" in kind.__name__ else {})
        with attach(pipe, policy, speedup=2.0) as handle:
            for strength, steps in ((0.75, 6), (0.25, 2)):
                pipe(**call_arguments(setting.case, strength=strength, **call))
                last = handle.stats.last
                assert last.computed_steps == max(2, steps // 2)
                assert last.computed_steps + last.reused_steps == steps
            assert handle.policy.fingerprint.pipeline == type(setting.pipe).__name__
    pipe.transformer = CASES["wan"].build().transformer
    with pytest.raises(PolicyError, match="for another pipeline: denoiser is 'WanTransformer3D"):
        attach(pipe, policy, speedup=2.0)


def test_record_of_image_to_image(flux: Setting) -> None:
    """Of the steps that are taken, on the sigmas that they have in the whole schedule."""
    pipe, given = flux_image_to_image(flux)
    full = record(pipe, **call_arguments(flux.case, strength=0.5, **given))
    assert full.run.num_steps == full.schedule.num_steps == 4
    assert not full.schedule.begun
    torch.testing.assert_close(full.schedule.sigmas, flux.sigmas[4:], rtol=0, atol=1e-6)


def test_a_later_start_that_leaves_one_step_computes_it() -> None:
    sampling = RingSampling(make("FlowMatchEulerDiscreteScheduler"))
    policy, (run, _) = profiled(sampling), sampling.record()
    late = {"start": STEPS - 1, "announced": True, "latents": run.latents[STEPS - 1]}
    full = sampling(**late)
    with attach(sampling, policy, min_psnr=45), pytest.warns(UserWarning, match="no plan is"):
        assert torch.equal(sampling(**late), full)
