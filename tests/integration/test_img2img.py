"""When a part of a profile is the profile of a part, and what is solved from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.gram import profile_run
from ertacache.core.plan import TrajectoryPlan
from ertacache.core.sampler import plain_plan, run_trajectory
from ertacache.core.solve import Fit, fit_plans
from ertacache.core.solver import Trajectory, run_reference
from ertacache.core.threshold import uniform_schedule
from ertacache.formats.fingerprint import Fingerprint, hash_config, hash_sigmas
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.later import budget_of, first_order_error, later_steps, solve_later
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make
from tests.integration.setting import paper_plan, trajectory_plan, watch_steps

# Two of the schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")

MULTISTEP = {"UniPCMultistepScheduler", "DPMSolverMultistepScheduler"}
FIRST = 4


def untouched_rest(sampling: Sampling, latents: Tensor) -> Trajectory:
    """The scheduler's own run from step ``FIRST`` on."""
    with watch_steps(sampling) as seen:
        last = sampling(start=FIRST, latents=latents)
    vars(sampling.scheduler).pop("step")
    return Trajectory((*seen.samples, last), tuple(seen.outputs))


@pytest.mark.parametrize("name", list(DETERMINISTIC))
def test_exact_for_steps_of_first_order_only(name: str) -> None:
    """The part of the profile against the profile of runs that really begin later."""
    sampling = Sampling(make(name))
    profile, (run, _) = sampling.profile(), sampling.record()
    rest = profile_run(untouched_rest(sampling, run.latents[FIRST]))
    part = later_steps(profile.statistics, FIRST)
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
    run = run_reference(flow.velocity, flow.noise(512, seed=0).view(8, 64, 2), sigmas=sigmas)
    statistics = profile_run(run)
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
    plans = policy.plan, plain_plan(policy.sigmas, policy.compute_steps)
    ours, plain = (
        rmse(
            run_trajectory(
                flow.velocity, full.latents[first], sigmas=policy.sigmas, plan=plan
            ).latents[-1],
            full.latents[-1],
        )
        for plan in plans
    )
    assert ours < plain / 2


def test_share_of_computed_steps_stays(ring: Policy) -> None:
    assert [budget_of(ring, steps) for steps in (1, 2, 5, 20, 30)] == [1, 1, 3, 10, 15]
    for first in (1, 11, 15, 18, 19):
        policy = solve_later(ring, first)
        assert len(policy.compute_steps) == budget_of(ring, 20 - first)
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
