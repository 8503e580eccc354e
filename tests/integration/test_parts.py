"""Runs on the last steps of a policy's table: image to image, and tables given by the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from torch import Tensor

from ertacache.core.gram import profile_run
from ertacache.core.plan import TrajectoryPlan
from ertacache.core.sampler import run_trajectory
from ertacache.core.solve import Fit, fit_plans
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration import attach, fingerprint, nominal, parts, record_run
from ertacache.integration.later import solve_later
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make
from tests.integration.setting import Seen, Setting, count_calls, watch_steps
from tests.integration.tiny import CASES

# One of the schedulers makes an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")

FIRST_ORDER = [name for name in DETERMINISTIC if "Multistep" not in name]
COMPUTED = (0, 2, 4, 6, 8)


def solved(profile: Profile, steps: tuple[int, ...] = COMPUTED) -> Policy:
    (plan,) = fit_plans(profile.statistics, profile.nominal, schedules=[steps], fit=Fit())
    return Policy(plan, profile.sigmas, fingerprint=profile.fingerprint, profile=profile)


def replayed(policy: Policy, seen: Seen) -> Tensor:
    """The reference loop over the outputs that a run really had on its computed steps."""
    assert isinstance(policy.plan, TrajectoryPlan)
    assert len(seen.outputs) == policy.num_steps
    outputs = iter([seen.outputs[k] for k in policy.compute_steps])
    return run_trajectory(
        lambda x, sigma: next(outputs), seen.samples[0], sigmas=policy.sigmas, plan=policy.plan
    ).latents[-1]


@pytest.mark.parametrize("name", FIRST_ORDER)
@pytest.mark.parametrize("told", [True, False])
def test_run_that_begins_late_follows_its_own_plan(name: str, told: bool) -> None:
    """Bit for bit the reference loop with the plan that was solved for these steps."""
    sampling = Sampling(make(name))
    if told and not hasattr(sampling.scheduler, "set_begin_index"):
        pytest.skip("this scheduler cannot be told")
    policy, (run, _) = solved(sampling.profile()), sampling.record()
    with attach(sampling, policy) as handle:
        whole = sampling()
        with watch_steps(sampling) as seen:
            result = sampling(start=4, told=told, latents=run.latents[4])
        assert (handle.stats.last.computed_steps, handle.stats.last.reused_steps) == (3, 3)
        assert torch.equal(result, replayed(solve_later(policy, 4), seen))
        assert getattr(sampling.scheduler, "step_index", STEPS) == STEPS  # of its whole table
        assert torch.equal(sampling(), whole)
    assert bool(((result - run.latents[-1]).norm() / run.latents[-1].norm()) < 0.05)


def test_solved_once_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def watched(policy: Policy, first: int) -> Policy:
        calls.append(first)
        return solve_later(policy, first)

    monkeypatch.setattr(parts, "solve_later", watched)
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = solved(sampling.profile())
    with attach(sampling, policy) as handle, caplog.at_level("INFO", logger="ertacache"):
        results = [sampling(start=start, told=told) for start, told in RUNS]
        assert handle.stats.runs == len(RUNS)
    assert calls == [3, 6]
    assert len(caplog.messages) == 2
    assert "for the last 7 of its 10 steps: 4 computed" in caplog.messages[0]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[4])


RUNS = [(3, True), (3, False), (6, True), (0, True), (3, True)]


def test_multistep_scheduler_is_refused() -> None:
    """Also where the profile could not tell, as in half precision."""
    sampling = Sampling(make("UniPCMultistepScheduler"))
    policy, untouched = solved(sampling.profile()), sampling()
    with attach(sampling, policy):
        with pytest.raises(
            PolicyError,
            match=r"does not begin with step 0.* use outputs of steps before.*detach it for this",
        ):
            sampling(start=4)
        sampling()
    assert torch.equal(sampling(), untouched)


def test_timestep_that_is_not_in_the_table() -> None:
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = solved(sampling.profile())
    with attach(sampling, policy):
        sampling.scheduler.set_timesteps(STEPS)
        x = torch.ones(2, 3, 4)
        t = sampling.scheduler.timesteps[0] - 1
        sampling.unet(x, t)
        with pytest.raises(PolicyError, match="is 0 times in the scheduler's table"):
            sampling.scheduler.step(x, t, x)


# Before the scheduler's shift, which is applied entry by entry.
TABLE = torch.linspace(1, 1 / 8, 8).tolist()


def flux_policy(flux: Setting) -> Policy:
    prompts = (ProfiledPrompt("a red circle moving left", 0),)
    profile = Profile(flux.facts, flux.sigmas, flux.nominal, profile_run(flux.run), prompts)
    return solved(profile, (0, 1, 3, 5))


def test_last_entries_of_the_table(flux: Setting) -> None:
    """As image to image by hand: latents of the caller, and where on the table they are."""
    policy, start = flux_policy(flux), flux.run.latents[2]
    with attach(flux.pipe, policy) as handle, count_calls(flux.pipe.transformer) as calls:
        with watch_steps(flux.pipe) as seen:
            result = flux.generate(sigmas=TABLE[2:], latents=start)
        assert len(calls) == handle.stats.last.computed_steps == 3
        assert torch.equal(result, replayed(solve_later(policy, 2), seen))
        flux.generate()
        assert handle.stats.last.computed_steps == 4
    full = flux.generate(sigmas=TABLE[2:], latents=start)
    torch.testing.assert_close(full, flux.run.latents[-1], rtol=0, atol=1e-4)


def test_last_entries_without_a_profile(flux: Setting) -> None:
    with (
        attach(flux.pipe, replace(flux_policy(flux), profile=None)),
        count_calls(flux.pipe.transformer) as calls,
        pytest.raises(
            PolicyError,
            match=r"takes the last 6 steps of the policy's table, but .* carries no profile.*; "
            r"run: ertacache calibrate MODEL .*--steps 6 --compute-steps 3 -o policy-6",
        ),
    ):
        flux.generate(sigmas=TABLE[2:])
    assert not calls


def test_other_entries_are_another_run(flux: Setting) -> None:
    """Every second level was profiled, but not the run that takes only those."""
    with (
        attach(flux.pipe, flux_policy(flux)),
        pytest.raises(PolicyError, match="has 4 steps, but the policy is for 8"),
    ):
        flux.generate(sigmas=TABLE[::2])


def test_image_to_image() -> None:
    """The pipeline calibrated on whole runs (strength 1), used at half the strength."""
    pipe = FluxImg2ImgPipeline(**CASES["flux"].build().components)
    pipe.set_progress_bar_config(disable=True)
    call = {
        "prompt": "a red circle",
        "image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        "num_inference_steps": 8,
        "height": 32,
        "width": 32,
        "max_sequence_length": 8,
        "output_type": "latent",
    }

    def generate(strength: float) -> Tensor:
        noise = torch.Generator().manual_seed(3)
        result: Any = pipe(**call, strength=strength, generator=noise)
        latents: Tensor = result[0]
        return latents

    noise = torch.Generator().manual_seed(3)
    run, sigmas = record_run(pipe, **call, strength=1.0, generator=noise)
    facts = fingerprint(pipe, sigmas=sigmas, latent_shape=run.latents[0].shape[1:])
    prompts = (ProfiledPrompt("a red circle", 3),)
    known = Profile(facts, sigmas, nominal(pipe.scheduler), profile_run(run), prompts)
    full = generate(0.5)
    policy = solved(known, (0, 1, 3, 5))
    with attach(pipe, policy) as handle:
        with watch_steps(pipe) as seen:
            near = generate(0.5)
        assert torch.equal(near, replayed(solve_later(policy, 4), seen))
        assert (handle.stats.last.computed_steps, handle.stats.last.reused_steps) == (2, 2)
        generate(1.0)
        assert handle.stats.last.computed_steps == 4
    assert not torch.equal(near, full)
    assert torch.equal(generate(0.5), full)
