"""Runs that begin later: what is solved from a part of the profile, and followed by pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from torch import Tensor

from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.gram import Trajectory, profile_run
from ertacache.core.plans import TrajectoryPlan, uniform_schedule
from ertacache.core.sampler import run, run_reference
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import make_stepper
from ertacache.formats.fingerprint import Fingerprint, hash_config, hash_sigmas
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration import img2img
from ertacache.integration.attach import attach
from ertacache.integration.identity import fingerprint, same_share
from ertacache.integration.img2img import first_order_error, solve_later
from ertacache.integration.record import record
from ertacache.integration.schedulers import first_order_update
from tests.integration.reference import replayed
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make
from tests.integration.setting import (
    Setting,
    count_calls,
    paper_plan,
    trajectory_plan,
    watch_steps,
)
from tests.integration.tiny import CASES

# Two of the schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")

MULTISTEP = {"UniPCMultistepScheduler", "DPMSolverMultistepScheduler"}
FIRST_ORDER = [name for name in DETERMINISTIC if name not in MULTISTEP]
FIRST = 4
COMPUTED = (0, 2, 4, 6, 8)


def own_rest(sampling: Sampling, latents: Tensor) -> Trajectory:
    """The scheduler's own run from step ``FIRST`` on."""
    with watch_steps(sampling) as seen:
        last = sampling(start=FIRST, latents=latents)
    vars(sampling.scheduler).pop("step")
    return Trajectory((*seen.samples, last), tuple(seen.outputs))


@pytest.mark.parametrize("name", list(DETERMINISTIC))
def test_exact_for_steps_of_first_order_only(name: str) -> None:
    """The part of the profile against the profile of runs that really begin later."""
    sampling = Sampling(make(name))
    profile, (full, _) = sampling.profile(), sampling.record()
    rest = profile_run(own_rest(sampling, full.latents[FIRST]))
    part = profile.statistics.from_step(FIRST)
    off = (part.inner - rest.inner).abs().max() / rest.inner.abs().max()
    plan = trajectory_plan(profile.nominal, (0, 2, 5, 8, 9))
    policy = Policy(plan, profile.sigmas, fingerprint=profile.fingerprint, profile=profile)
    if name in MULTISTEP:
        assert off > 1e-4
        assert first_order_error(profile, FIRST) > 1e-5
        with pytest.raises(PolicyError, match="use outputs of steps before"):
            solve_later(policy, FIRST)
        return
    assert off < 1e-6
    for field in ("means", "residual_l1", "residual_norm", "output_l1", "output_norm"):
        torch.testing.assert_close(getattr(part, field), getattr(rest, field), rtol=0, atol=1e-5)
    assert first_order_error(profile, FIRST) < 1e-6
    assert solve_later(policy, FIRST).num_steps == STEPS - FIRST


@pytest.fixture(scope="module")
def ring() -> Policy:
    """Every second of 20 steps computed, on a flow that is known in closed form."""
    flow, sigmas = GaussianRing(2.0, 0.3), shifted_sigmas(20).double()
    full = run_reference(flow.velocity, flow.noise(512, seed=0).view(8, 64, 2), sigmas=sigmas)
    statistics = profile_run(full)
    d = sigmas.diff()
    nominal = torch.stack([torch.ones_like(d), d], dim=1)
    facts = Fingerprint(
        pipeline="Ring",
        denoiser="Ring",
        denoiser_hash=hash_config({}),
        scheduler="Euler",
        scheduler_config={},
        num_steps=20,
        sigmas_hash=hash_sigmas(sigmas),
        guidance=None,
        dtype="float32",
        latent_shape=(64, 2),
        versions={},
    )
    prompts = tuple(ProfiledPrompt("", seed) for seed in range(8))
    profile = Profile(facts, sigmas, nominal, statistics, prompts)
    steps = uniform_schedule(20, 10)
    (plan,) = fit_plans(statistics, nominal, schedules=[steps], fit=Fit())
    return Policy(plan, sigmas, fingerprint=facts, profile=profile)


@pytest.mark.parametrize("first", [1, 7, 12])
def test_later_policy_is_better_than_plain_reuse(ring: Policy, first: int) -> None:
    flow = GaussianRing(2.0, 0.3)
    full = run_reference(flow.velocity, flow.noise(512, seed=5), sigmas=ring.sigmas)
    policy = solve_later(ring, first)
    assert isinstance(policy.plan, TrajectoryPlan)
    d = policy.sigmas.diff()
    plain = TrajectoryPlan(policy.compute_steps, torch.stack([torch.ones_like(d), d], 1)[:, None])
    errors = []
    for plan in (policy.plan, plain):
        stepper, start = make_stepper(plan), full.latents[first]
        latents = run(flow.velocity, start, stepper, sigmas=policy.sigmas)
        errors.append(rmse(latents[-1], full.latents[-1]))
    assert errors[0] < errors[1] / 2


def test_share_of_computed_steps_stays(ring: Policy) -> None:
    assert [same_share(ring, steps) for steps in (1, 2, 5, 20, 30)] == [1, 1, 3, 10, 15]
    for first in (1, 11, 15, 18, 19):
        policy = solve_later(ring, first)
        assert len(policy.compute_steps) == same_share(ring, 20 - first)
        assert torch.equal(policy.sigmas, ring.sigmas[first:])
        assert policy.profile is None


def test_what_cannot_be_solved_again(ring: Policy) -> None:
    steps = (*ring.compute_steps[:-1], 19)
    paper = Policy(
        paper_plan(ring.sigmas, steps),
        ring.sigmas,
        fingerprint=ring.fingerprint,
        profile=ring.profile,
    )
    with pytest.raises(PolicyError, match="paper's method is for whole runs"):
        solve_later(paper, 3)
    bare = Policy(ring.plan, ring.sigmas, fingerprint=ring.fingerprint)
    with pytest.raises(PolicyError, match="carries no profile"):
        solve_later(bare, 3)


def solved(profile: Profile, steps: tuple[int, ...] = COMPUTED) -> Policy:
    (plan,) = fit_plans(profile.statistics, profile.nominal, schedules=[steps], fit=Fit())
    return Policy(plan, profile.sigmas, fingerprint=profile.fingerprint, profile=profile)


@pytest.mark.parametrize("name", FIRST_ORDER)
@pytest.mark.parametrize("announced", [True, False])
def test_run_that_begins_late_follows_its_own_plan(name: str, announced: bool) -> None:
    """Bit for bit the reference loop with the plan that was solved for these steps."""
    sampling = Sampling(make(name))
    if announced and not hasattr(sampling.scheduler, "set_begin_index"):
        pytest.skip("this scheduler has no begin index")
    policy, (full, _) = solved(sampling.profile()), sampling.record()
    with attach(sampling, policy) as handle:
        whole = sampling()
        with watch_steps(sampling) as seen:
            result = sampling(start=4, announced=announced, latents=full.latents[4])
        assert (handle.stats.last.computed_steps, handle.stats.last.reused_steps) == (3, 3)
        assert torch.equal(result, replayed(solve_later(policy, 4), seen)[-1])
        assert getattr(sampling.scheduler, "step_index", STEPS) == STEPS  # of the whole schedule
        assert torch.equal(sampling(), whole)
    assert bool(((result - full.latents[-1]).norm() / full.latents[-1].norm()) < 0.05)


def test_solved_once_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def watched(policy: Policy, first: int) -> Policy:
        calls.append(first)
        return solve_later(policy, first)

    monkeypatch.setattr(img2img, "solve_later", watched)
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = solved(sampling.profile())
    with attach(sampling, policy) as handle, caplog.at_level("INFO", logger="ertacache"):
        results = [sampling(start=start, announced=announced) for start, announced in RUNS]
        assert handle.stats.runs == len(RUNS)
    assert calls == [3, 6]
    assert len(caplog.messages) == 2
    assert "for the last 7 of its 10 steps: 4 computed" in caplog.messages[0]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[4])


RUNS = [(3, True), (3, False), (6, True), (0, True), (3, True)]


def test_multistep_scheduler_is_refused() -> None:
    """Also where the profile could not show it, as in half precision."""
    sampling = Sampling(make("UniPCMultistepScheduler"))
    policy, full = solved(sampling.profile()), sampling()
    with attach(sampling, policy):
        with pytest.raises(
            PolicyError,
            match=r"does not begin with step 0.* use outputs of steps before.*detach it for this",
        ):
            sampling(start=4)
        sampling()
    assert torch.equal(sampling(), full)


def test_timestep_that_is_not_the_schedulers() -> None:
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = solved(sampling.profile())
    with attach(sampling, policy):
        sampling.scheduler.set_timesteps(STEPS)
        x = torch.ones(2, 3, 4)
        t = sampling.scheduler.timesteps[0] - 1
        sampling.unet(x, t)
        with pytest.raises(PolicyError, match="is 0 times in the scheduler's timesteps"):
            sampling.scheduler.step(x, t, x)


# Before the scheduler's shift, which is applied entry by entry.
SIGMAS = torch.linspace(1, 1 / 8, 8).tolist()


def flux_policy(flux: Setting) -> Policy:
    prompts = (ProfiledPrompt("a red circle moving left", 0),)
    profile = Profile(flux.facts, flux.sigmas, flux.nominal, profile_run(flux.run), prompts)
    return solved(profile, (0, 1, 3, 5))


def test_last_entries_of_the_sigma_schedule(flux: Setting) -> None:
    """As image to image by hand: latents of the caller, and where on the schedule they are."""
    policy, start = flux_policy(flux), flux.run.latents[2]
    with attach(flux.pipe, policy) as handle, count_calls(flux.pipe.transformer) as calls:
        with watch_steps(flux.pipe) as seen:
            result = flux.generate(sigmas=SIGMAS[2:], latents=start)
        assert len(calls) == handle.stats.last.computed_steps == 3
        assert torch.equal(result, replayed(solve_later(policy, 2), seen)[-1])
        flux.generate()
        assert handle.stats.last.computed_steps == 4
    full = flux.generate(sigmas=SIGMAS[2:], latents=start)
    torch.testing.assert_close(full, flux.run.latents[-1], rtol=0, atol=1e-4)


def test_last_entries_without_a_profile(flux: Setting) -> None:
    with (
        attach(flux.pipe, replace(flux_policy(flux), profile=None)),
        count_calls(flux.pipe.transformer) as calls,
        pytest.raises(
            PolicyError,
            match=r"takes the last 6 steps of the policy's sigma schedule, but .* "
            r"carries no profile.*; "
            r"run: ertacache calibrate MODEL .*--steps 6 --compute-steps 3 -o policy-6",
        ),
    ):
        flux.generate(sigmas=SIGMAS[2:])
    assert not calls


def test_other_entries_are_another_run(flux: Setting) -> None:
    """Every second level was profiled, but not the run that takes only those."""
    with (
        attach(flux.pipe, flux_policy(flux)),
        pytest.raises(PolicyError, match="has 4 steps, but the policy is for 8"),
    ):
        flux.generate(sigmas=SIGMAS[::2])


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
    whole = record(pipe, **call, strength=1.0, generator=noise)
    sigmas, shape = whole.sigmas, whole.run.latents[0].shape[1:]
    facts = fingerprint(pipe, sigmas=sigmas, latent_shape=shape)
    prompts = (ProfiledPrompt("a red circle", 3),)
    update = first_order_update(pipe.scheduler)
    known = Profile(facts, sigmas, update, profile_run(whole.run), prompts)
    full = generate(0.5)
    policy = solved(known, (0, 1, 3, 5))
    with attach(pipe, policy) as handle:
        with watch_steps(pipe) as seen:
            near = generate(0.5)
        assert torch.equal(near, replayed(solve_later(policy, 4), seen)[-1])
        assert (handle.stats.last.computed_steps, handle.stats.last.reused_steps) == (2, 2)
        generate(1.0)
        assert handle.stats.last.computed_steps == 4
    assert not torch.equal(near, full)
    assert torch.equal(generate(0.5), full)
