"""Loops that are not diffusers': the policy of a recorder, of a loop, and of a pipeline."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ertacache
from ertacache.calibration.recorder import Recorder
from ertacache.calibration.solve import solve
from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.groups import Groups, Layout
from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.core.sampler import run_reference
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.guided import GuidedCoefficients
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.sample import PolicySampler, denoise_of, sample
from tests.core import samplers
from tests.core.solvers import AdamsBashforth

FLOW = GaussianRing(radius=2.0, width=0.3)
T = 20
SIGMAS = shifted_sigmas(T)


def noise(seed: int) -> Tensor:
    return FLOW.noise(128, seed).view(1, 4, 16, 2, 2)[..., 0, :]


def recorded(sigmas: Tensor = SIGMAS, *, runs: int = 6, **options: Any) -> Policy:
    recorder = Recorder(sigmas, **options)
    for seed in range(runs):
        run = recorder.wrap(velocity, f"prompt {seed}", seed=seed)
        solver = options.get("solver")
        run_reference(run, noise(seed), sigmas=sigmas, **({"solver": solver} if solver else {}))
    return recorder.policy()


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    return FLOW.velocity(x, sigma)


def model(x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
    """The same network as k-diffusion has it: x0, one sigma per sample."""
    return x - sigma[0] * velocity(x, sigma[0])


@pytest.fixture(scope="module")
def policy() -> Policy:
    return recorded()


def full_run(seed: int = 50, sigmas: Tensor = SIGMAS, **solver: Any) -> Tensor:
    return run_reference(velocity, noise(seed), sigmas=sigmas, **solver).latents[-1]


class Counted:
    def __init__(self, denoise: Any = velocity) -> None:
        self.calls, self._denoise = 0, denoise

    def __call__(self, x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
        self.calls += 1
        return self._denoise(x, sigma, **extra)


def test_half_of_the_evaluations_come_close_to_the_full_run(policy: Policy) -> None:
    network = Counted()
    fast = sample(network, noise(50), SIGMAS, policy, speedup=2)
    few = run_reference(velocity, noise(50), sigmas=shifted_sigmas(10)).latents[-1]
    assert network.calls == 10
    assert rmse(fast, full_run()) < 0.2 * rmse(few, full_run())


def test_all_computed_is_the_loop_written_by_hand(policy: Policy) -> None:
    x, sigmas = noise(50).float(), SIGMAS.float()
    ours = sample(velocity, x, sigmas, policy, speedup=1)
    for k in range(T):
        x = x + (sigmas[k + 1] - sigmas[k]) * velocity(x, sigmas[k])
    assert torch.equal(ours, x)


def test_another_number_of_steps_is_solved_from_the_profile(policy: Policy) -> None:
    sigmas, network = shifted_sigmas(14), Counted()
    fast = sample(network, noise(50), sigmas, policy, compute_steps=7)
    assert network.calls == 7
    few = run_reference(velocity, noise(50), sigmas=shifted_sigmas(7)).latents[-1]
    assert rmse(fast, full_run(sigmas=sigmas)) < 0.5 * rmse(few, full_run(sigmas=sigmas))


def test_another_solver_is_the_target_of_the_plan(policy: Policy) -> None:
    fast = sample(velocity, noise(50), SIGMAS, policy, speedup=2, solver=AdamsBashforth)
    multistep = full_run(solver=AdamsBashforth)
    assert rmse(fast, multistep) < 0.5 * rmse(full_run(), multistep)


def test_a_run_that_begins_later_is_followed(policy: Policy) -> None:
    late = SIGMAS[8:]
    start = run_reference(velocity, noise(50), sigmas=SIGMAS[:9]).latents[-1]
    network = Counted()
    fast = sample(network, start, late, policy, compute_steps=6)
    assert network.calls == 6
    fewer = run_reference(velocity, start, sigmas=late[::2]).latents[-1]
    assert len(late[::2]) == 1 + 6
    assert rmse(fast, full_run()) < rmse(fewer, full_run()) / 2


def test_min_psnr_computes_fewer_steps_for_less(policy: Policy) -> None:
    calls = []
    for psnr in (30.0, 60.0):
        network = Counted()
        sample(network, noise(50), SIGMAS, policy, min_psnr=psnr)
        calls.append(network.calls)
    assert calls[0] < calls[1] < T


def test_the_second_run_solves_nothing(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with caplog.at_level("INFO", logger="ertacache"):
            sample(velocity, noise(50), SIGMAS, policy, compute_steps=13)
    assert len([r for r in caplog.records if "solved a plan" in r.message]) == 1


def test_a_file_is_taken_too(policy: Policy, tmp_path: Any) -> None:
    policy.save(tmp_path / "loop.safetensors")
    ours = sample(velocity, noise(50), SIGMAS, tmp_path / "loop.safetensors", speedup=2)
    assert torch.equal(ours, sample(velocity, noise(50), SIGMAS, policy, speedup=2))


def test_latents_in_half_precision_are_kept_in_float32_between_steps(policy: Policy) -> None:
    seen: list[torch.dtype] = []

    def rough(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append(x.dtype)
        return velocity(x.float(), sigma.float()).bfloat16()

    fast = sample(rough, noise(50).bfloat16(), SIGMAS, policy, speedup=2)
    assert fast.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    assert rmse(fast.double(), full_run()) < 0.1


def test_the_callback_sees_every_step_and_x0(policy: Policy) -> None:
    reports: list[dict[str, Any]] = []
    fast = sample(velocity, noise(50), SIGMAS, policy, speedup=2, callback=reports.append)
    assert [report["i"] for report in reports] == list(range(T))
    assert torch.equal(reports[0]["x"], noise(50))
    torch.testing.assert_close(
        reports[0]["denoised"], noise(50) - velocity(noise(50), SIGMAS[0]) * SIGMAS[0]
    )
    torch.testing.assert_close(reports[-1]["denoised"], fast, rtol=1e-3, atol=1e-3)


def test_an_exception_from_the_callback_ends_the_run(policy: Policy) -> None:
    network = Counted()

    def interrupt(report: dict[str, Any]) -> None:
        if report["i"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(network, noise(50), SIGMAS, policy, speedup=2, callback=interrupt)
    assert network.calls <= 4
    assert sample(velocity, noise(50), SIGMAS, policy, speedup=2).shape == noise(50).shape


# What cannot work


def test_an_output_of_another_shape_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"denoise returned \(1, 4, 16\) for latents of shape"):
        sample(lambda x, s: x[..., 0], noise(50), SIGMAS, policy, speedup=2)
    with pytest.raises(ValueError, match="denoise returned tuple"):
        sample(lambda x, s: (x,), noise(50), SIGMAS, policy, speedup=2)  # type: ignore[arg-type,return-value]


def test_another_number_of_channels_is_refused(policy: Policy) -> None:
    other = torch.randn(1, 16, 16, 2)
    with pytest.raises(PolicyError, match=r"another model: latent_shape is \(16, 16, 2\), was"):
        sample(velocity, other, SIGMAS, policy, speedup=2)


def test_another_prediction_is_refused(policy: Policy) -> None:
    with pytest.raises(PolicyError, match="prediction is 'epsilon', was 'flow'"):
        sample(velocity, noise(50), SIGMAS, policy, speedup=2, prediction="epsilon")
    facts = replace(policy.fingerprint, prediction="v_prediction")
    other = replace(policy, fingerprint=facts)
    with pytest.raises(PolicyError, match="predicts 'v_prediction'"):
        sample(velocity, noise(50), SIGMAS, other, speedup=2)


def test_another_model_is_refused_if_both_have_a_name(policy: Policy) -> None:
    named = recorded(runs=2, model="WanModel")
    with pytest.raises(PolicyError, match="denoiser is 'Flux', was 'WanModel'"):
        sample(velocity, noise(50), SIGMAS, named, speedup=2, model="Flux")
    for one, name in ((named, "WanModel"), (named, None), (policy, "Flux")):
        assert sample(velocity, noise(50), SIGMAS, one, speedup=2, model=name).isfinite().all()


def test_outputs_of_the_opposite_sign_are_refused(policy: Policy) -> None:
    profile = policy.profile
    assert profile is not None
    turned = torch.ones(1, T + 1).double()
    turned[0, 1:] = -1
    schedule = replace(
        profile.schedule,
        nominal=profile.schedule.nominal * torch.tensor([1.0, -1.0]).double(),
        latents=profile.schedule.latents * turned,
    )
    other = replace(policy, profile=replace(profile, schedule=schedule))
    with pytest.raises(PolicyError, match="have the opposite sign of the calibrated ones"):
        sample(velocity, noise(50), SIGMAS, other, speedup=2)


def test_sigmas_of_another_kind_are_refused(policy: Policy) -> None:
    with pytest.raises(PolicyError, match=r"as those of a flow, got 14\.6 to 0"):
        sample(velocity, noise(50), samplers.karras(10), policy, speedup=2)
    with pytest.raises(PolicyError, match="must descend"):
        sample(velocity, noise(50), SIGMAS.flip(0), policy, speedup=2)


def test_latents_that_are_no_tensor_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="must be one tensor, not a list"):
        sample(velocity, [noise(50)], SIGMAS, policy, speedup=2)  # type: ignore[arg-type]


def test_nan_of_the_network_is_reported(policy: Policy) -> None:
    with pytest.warns(UserWarning, match="output on step 0 held NaN"):
        sample(lambda x, s: x * torch.nan, noise(50), SIGMAS, policy, speedup=2)


def test_more_than_one_target_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="one target"):
        sample(velocity, noise(50), SIGMAS, policy, speedup=2, compute_steps=3)
    with pytest.raises(PolicyError, match="holds no plan yet: give a speed-up"):
        sample(velocity, noise(50), SIGMAS, policy)


def grouped_plan(groups: Groups) -> FittedPlan:
    update = torch.stack([torch.ones(T), SIGMAS.diff()], dim=1).double()
    z = update[:, None].expand(T, groups.count, 2).clone()
    return FittedPlan(TrajectoryPlan(tuple(range(0, T, 2)), z, groups), SIGMAS)


def test_a_plan_with_groups_needs_a_layout(policy: Policy) -> None:
    with_groups = Policy(policy.fingerprint, plans=(grouped_plan(Groups(channels=2)),))
    tokens = noise(50).flatten(2).mT.contiguous()  # (1, 32, 4)
    with pytest.raises(PolicyError, match=r"shape \(1, 32, 4\) are not known: give layout="):
        sample(lambda x, s: x, tokens, SIGMAS, with_groups)
    with pytest.raises(PolicyError, match="is not the layout of latents of shape"):
        sample(lambda x, s: x, tokens, SIGMAS, with_groups, layout=Layout(2, grid=(3, 3)))
    right = sample(lambda x, s: x, tokens, SIGMAS, with_groups, layout=Layout(2, grid=(16, 2)))
    images = sample(lambda x, s: x, noise(50), SIGMAS, with_groups)
    torch.testing.assert_close(right, images.flatten(2).mT)


def test_a_plan_with_a_second_history_is_replaced_by_a_solved_one(policy: Policy) -> None:
    z = torch.zeros(T, 1, 3, dtype=torch.float64)
    branch = FittedPlan(TrajectoryPlan(tuple(range(0, T, 2)), z, branch=True), SIGMAS)
    mixed = replace(policy, plans=(branch,))
    ours = sample(velocity, noise(50), SIGMAS, mixed)
    assert torch.equal(ours, sample(velocity, noise(50), SIGMAS, policy, speedup=2))


def guided(policy: Policy, argument: str = "guidance_scale") -> Policy:
    """The policy with a plan that reuses nothing but noise at guidance 2, and is right at 4."""
    known = solve(policy, speedup=2).default
    assert isinstance(known.plan, TrajectoryPlan)
    z = known.plan.coefficients
    own = GuidedCoefficients(argument, (2.0, 4.0), torch.stack([torch.zeros_like(z), z]))
    return policy.with_plan(replace(known, guided=own))


def test_a_run_takes_the_coefficients_of_its_guidance(policy: Policy) -> None:
    listed, noises = guided(policy), noise(50)
    plain = sample(velocity, noises, SIGMAS, policy, speedup=2)
    for given in ({}, {"cfg": 2.0}, {"guidance_scale": 4.0}):
        found = sample(velocity, noises, SIGMAS, listed, speedup=2, guidance=given)
        assert torch.equal(found, plain)
    found = sample(velocity, noises, SIGMAS, listed, speedup=2, guidance={"guidance_scale": 2})
    assert not torch.allclose(found, plain, rtol=0.1, atol=0.1)
    sampler = PolicySampler(listed, samplers.euler, speedup=2)
    for value, same in ((4.0, True), (2.0, False), (3.9, False)):
        sampler.guidance = {"guidance_scale": value}
        found = sampler(model, noises, SIGMAS)
        assert torch.allclose(found, plain, rtol=1e-4, atol=1e-4) == same


def test_a_plan_of_the_papers_method_takes_the_steps_of_the_solver(policy: Policy) -> None:
    plan = FittedPlan(PaperPlan((0, 5, T - 1), "velocity", SIGMAS), SIGMAS)
    paper = Policy(policy.fingerprint, plans=(plan,))
    network = Counted()
    sample(network, noise(50), SIGMAS, paper)
    assert network.calls == 3
    with pytest.raises(PolicyError, match="paper's method, which takes the steps of a solver"):
        PolicySampler(paper, samplers.euler)(model, noise(50), SIGMAS)


# Sampler functions


@pytest.mark.parametrize("base", [samplers.euler, samplers.dpmpp_2m, samplers.dpm_2])
def test_a_sampler_function_that_follows_a_policy(policy: Policy, base: Any) -> None:
    network = Counted(model)
    fast = PolicySampler(policy, base, speedup=2)
    result = fast(network, noise(50), SIGMAS)
    full = base(model, noise(50), SIGMAS)
    steps = 2 * T - 1 if base is samplers.dpm_2 else T
    assert network.calls == fast.computed == steps // 2
    assert fast.plan is not None
    few = base(model, noise(50), shifted_sigmas(T // 2))
    assert rmse(result, full) < 0.5 * rmse(few, full)


def test_all_computed_is_the_base_sampler_itself(policy: Policy) -> None:
    for base in (samplers.euler, samplers.dpmpp_2m):
        fast = PolicySampler(policy, base, speedup=1)
        x, sigmas = noise(50).float(), SIGMAS.float()
        assert torch.equal(fast(model, x, sigmas), base(model, x, sigmas))
        assert fast.plan is None


def test_the_base_sampler_gets_the_arguments_of_the_call(policy: Policy) -> None:
    seen: list[dict[str, Any]] = []

    def base(
        model: Any, x: Tensor, sigmas: Tensor, extra_args: Any, callback: Any, disable: Any, eta=1.0
    ) -> Tensor:
        seen.append({"extra": extra_args, "callback": callback, "disable": disable, "eta": eta})
        return samplers.euler(model, x, sigmas, extra_args)

    fast = PolicySampler(policy, base, speedup=1)
    told = print
    fast(model, noise(50), SIGMAS, {"seed": 3}, told, False, eta=0.0)
    assert seen[-1] == {"extra": {"seed": 3}, "callback": told, "disable": False, "eta": 0.0}


def test_callbacks_count_the_intervals_of_the_schedule(policy: Policy) -> None:
    reports: list[dict[str, Any]] = []
    fast = PolicySampler(policy, samplers.dpm_2, speedup=2)
    fast(model, noise(50), SIGMAS, callback=reports.append)
    assert [r["i"] for r in reports] == sorted(2 * list(range(T)))[:-1]


def test_a_sampler_that_adds_noise_is_refused(policy: Policy) -> None:
    with pytest.raises(PolicyError, match="adds noise on its way"):
        PolicySampler(policy, samplers.ancestral, speedup=2)(model, noise(50), SIGMAS)


def test_a_sampler_may_read_the_attributes_of_the_model(policy: Policy) -> None:
    class Wrapped:
        inner_model = type("Inner", (), {"kind": "flow"})

        def __call__(self, x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
            return model(x, sigma)

    fast = PolicySampler(policy, samplers.reading, speedup=2)
    result = fast(Wrapped(), noise(50), SIGMAS)
    assert rmse(result, full_run()) < 0.01
    with pytest.raises(PolicyError, match="cannot be run on unit vectors"):
        PolicySampler(policy, samplers.reading, speedup=2)(model, noise(50), SIGMAS)


def test_sigmas_of_unscaled_data_with_a_policy_of_their_own() -> None:
    sigmas = samplers.karras(T)

    def epsilon(x: Tensor, sigma: Tensor) -> Tensor:
        """The ring seen by a model that does not scale its data: x = x0 + s noise."""
        share = sigma / (1 + sigma)
        y = (1 - share) * x
        v = FLOW.velocity(y, share)  # noise - x0
        return v + (y - share * v)

    recorder = Recorder(sigmas)
    for seed in range(6):
        run_reference(recorder.wrap(epsilon, seed=seed), sigmas[0] * noise(seed), sigmas=sigmas)
    policy = recorder.policy()
    assert policy.fingerprint.prediction == "epsilon"
    start = sigmas[0] * noise(50)
    full = run_reference(epsilon, start, sigmas=sigmas).latents[-1]
    few = run_reference(epsilon, start, sigmas=samplers.karras(T // 2)).latents[-1]
    fast = sample(epsilon, start, sigmas, policy, speedup=2)
    assert rmse(fast, full) < 0.3 * rmse(few, full)
    middle = run_reference(epsilon, start, sigmas=sigmas[:13]).latents[-1]
    assert sigmas[12] < 1  # and no flow
    late = sample(epsilon, middle, sigmas[12:], policy, compute_steps=5)
    assert rmse(late, full) < 0.05


def test_denoise_of_a_model_is_its_velocity() -> None:
    x, sigma = noise(3), SIGMAS[4]
    torch.testing.assert_close(denoise_of(model)(x, sigma), velocity(x, sigma))


def test_sampling_loads_no_pipeline_library() -> None:
    code = "import sys, ertacache; ertacache.sample; ertacache.Recorder; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "torch" in loaded
    assert not {"diffusers", "transformers", "accelerate"} & set(loaded)
    assert ertacache.sample is sample
