"""A loop as a pipeline: everything that works with pipelines works with it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ertacache
from ertacache.calibration.session import RESERVED
from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.groups import Layout
from ertacache.core.sampler import run_reference
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.loops import Loop
from ertacache.integration.sample import sample
from ertacache.integration.schedulers import read_schedule
from tests.core import samplers
from tests.core.solvers import AdamsBashforth
from tests.integration.tiny import CASES, call_arguments

FLOW = GaussianRing(radius=2.0, width=0.3)
T = 12
SIGMAS = shifted_sigmas(T)
SHAPE = (6, 8, 2)
PROMPTS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def denoise_for(prompt: str, shift: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, sigma: FLOW.velocity(x - shift, sigma)


def start(generator: torch.Generator) -> Tensor:
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def full_run(seed: int, **solver: Any) -> Tensor:
    noise = start(torch.Generator().manual_seed(seed))[None]
    return run_reference(denoise_for(""), noise, sigmas=SIGMAS, **solver).latents[-1]


@pytest.fixture(scope="module")
def calibrated() -> Policy:
    return ertacache.calibrate(Loop(denoise_for, SIGMAS, start), PROMPTS, speedup=2, batch_size=2)


def test_a_full_run_is_the_loop_written_by_hand() -> None:
    loop = Loop(denoise_for, SIGMAS, start)
    ours = loop("a", generator=torch.Generator().manual_seed(7), output_type="latent")
    assert torch.equal(ours, full_run(7))


def test_calibrate_profiles_tries_refits_and_validates(calibrated: Policy) -> None:
    assert calibrated.fits
    assert calibrated.unit_psnr is not None
    (plan,) = calibrated.plans
    assert plan.measured_error is not None
    rows = {row.method: row.psnr for row in plan.validation}
    assert rows["policy"] > rows["fewer steps"] + 6
    assert rows["policy"] > rows["plain reuse"] + 6


def test_the_policy_of_a_loop_serves_sample(calibrated: Policy) -> None:
    noise = start(torch.Generator().manual_seed(7))[None]
    fast = sample(denoise_for(""), noise, SIGMAS, calibrated)
    with ertacache.attach(Loop(denoise_for, SIGMAS, start), calibrated) as handle:
        loop = handle._setup.pipe
        same = loop("", generator=torch.Generator().manual_seed(7), output_type="latent")
    assert handle.stats.last.computed_steps == T // 2
    torch.testing.assert_close(fast, same)
    assert rmse(fast, full_run(7)) < 0.05


def test_refit_adds_a_plan_for_another_number_of_steps(calibrated: Policy) -> None:
    loop = Loop(denoise_for, shifted_sigmas, start)
    more = ertacache.refit(loop, calibrated, speedup=3, num_inference_steps=9)
    assert [len(plan.compute_steps) for plan in more.plans] == [6, 3]


@pytest.mark.parametrize("sampler", [samplers.dpmpp_2m, samplers.dpm_2])
def test_a_sampler_function_is_calibrated(sampler: Any) -> None:
    loop = Loop(denoise_for, SIGMAS, start, sampler=sampler)
    steps = 2 * T - 1 if sampler is samplers.dpm_2 else T
    policy = ertacache.calibrate(loop, PROMPTS[:4], compute_steps=6, refit=False)
    assert policy.profile is not None
    assert policy.profile.num_steps == steps

    def model(x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
        return x - sigma[0] * FLOW.velocity(x, sigma[0])

    noise = start(torch.Generator().manual_seed(7))[None]
    ours = loop("a", generator=torch.Generator().manual_seed(7), output_type="latent")
    torch.testing.assert_close(ours, sampler(model, noise, SIGMAS))


def test_a_solver_of_ones_own_is_followed() -> None:
    loop = Loop(denoise_for, SIGMAS, start, solver=AdamsBashforth)
    ours = loop("a", generator=torch.Generator().manual_seed(7), output_type="latent")
    assert torch.equal(ours, full_run(7, solver=AdamsBashforth))
    loop.scheduler.set_timesteps()
    assert not read_schedule(loop.scheduler).same_run(
        read_schedule(Loop(denoise_for, SIGMAS, start).scheduler)
    )


def test_arguments_reach_the_function_that_makes_the_network() -> None:
    seen: list[tuple[str, float]] = []

    def watched(prompt: str, guidance_scale: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
        seen.append((prompt, guidance_scale))
        return denoise_for(prompt)

    policy = ertacache.profile(Loop(watched, SIGMAS, start), ["a", "b"], guidance_scale=5.0)
    assert seen == [("a", 5.0), ("b", 5.0)]
    assert policy.fingerprint.guidance == {"guidance_scale": (5.0,)}


def test_values_of_an_argument_are_spread_over_the_prompts() -> None:
    policy = ertacache.profile(Loop(denoise_for, SIGMAS, start), PROMPTS[:4], shift=[0.0, 0.5])
    assert policy.profile is not None
    found = {run.prompt: dict(run.arguments) for run in policy.profile.runs}
    assert found == {p: {"shift": 0.5 * (k % 2)} for k, p in enumerate(PROMPTS[:4])}


def test_another_number_of_steps_interpolates_the_sigmas() -> None:
    loop = Loop(denoise_for, SIGMAS, start)
    loop.scheduler.set_timesteps(6)
    torch.testing.assert_close(loop.scheduler.sigmas, SIGMAS[::2])
    of_steps = Loop(denoise_for, shifted_sigmas, start)
    of_steps.scheduler.set_timesteps(7)
    torch.testing.assert_close(of_steps.scheduler.sigmas, shifted_sigmas(7))
    with pytest.raises(ValueError, match="num_inference_steps="):
        of_steps("a")


def test_evaluations_are_counted_if_there_are_two_per_interval() -> None:
    loop = Loop(denoise_for, SIGMAS, start, sampler=samplers.dpm_2)
    loop.scheduler.set_timesteps(11)
    assert len(loop.scheduler.timesteps) == 11  # of six intervals
    loop.scheduler.set_timesteps(10)
    assert len(loop.scheduler.timesteps) == 9


def test_decoded_results_are_compared_if_there_is_a_decoder() -> None:
    decoded: list[int] = []

    def decode(latents: Tensor) -> Tensor:
        decoded.append(len(latents))
        return latents.sigmoid()

    loop = Loop(denoise_for, SIGMAS, start, decode=decode)
    assert loop("a").max() <= 1
    assert decoded == [1]


def test_a_copy_of_the_scheduler_shares_no_state_and_copies_no_model() -> None:
    class Heavy:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the model was copied")

    heavy = Heavy()
    loop = Loop(denoise_for, SIGMAS, start, sampler=samplers.euler, like=heavy)
    twin = copy.deepcopy(loop.scheduler)
    twin.set_timesteps(5)
    assert len(loop.scheduler.timesteps) == T


def test_an_error_of_the_network_leaves_the_loop_usable(calibrated: Policy) -> None:
    broken = [True]

    def breaking(prompt: str) -> Callable[[Tensor, Tensor], Tensor]:
        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            if broken[0] and sigma < 0.7:
                raise KeyboardInterrupt
            return FLOW.velocity(x, sigma)

        return denoise

    loop = Loop(breaking, SIGMAS, start)
    with ertacache.attach(loop, calibrated):
        with pytest.raises(KeyboardInterrupt):
            loop("a")
        broken[0] = False
        fast = loop("a", generator=torch.Generator().manual_seed(7), output_type="latent")
    assert rmse(fast, full_run(7)) < 0.05


def test_a_sampler_that_adds_noise_is_refused_at_once() -> None:
    with pytest.raises(PolicyError, match="adds noise"):
        Loop(denoise_for, SIGMAS, start, sampler=samplers.ancestral)


def test_the_policy_of_a_loop_is_refused_by_a_pipeline_with_other_latents(
    calibrated: Policy,
) -> None:
    pipe = CASES["sd3"].build()
    with (
        ertacache.attach(pipe, calibrated),
        pytest.raises(PolicyError, match="latent_shape is"),
    ):
        pipe(**call_arguments(CASES["sd3"]))


class BareFlux:
    """The network of the tiny Flux pipeline in a bare loop, on latents that are not packed."""

    def __init__(self) -> None:
        self.pipe, self.call = CASES["flux"].build(), call_arguments(CASES["flux"])
        given: list[dict[str, Any]] = []
        hook = self.pipe.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs), with_kwargs=True
        )
        self.packed = self.generate()
        hook.remove()
        self.inputs = given[0]
        self.sigmas = self.pipe.scheduler.sigmas.clone()
        self.noise = self.layout.unpack(given[0]["hidden_states"])

    @property
    def layout(self) -> Layout:
        side = math.isqrt(self.packed.shape[1])
        return Layout(2, grid=(side, side), patch=2)

    def generate(self) -> Tensor:
        found: Tensor = self.pipe(**self.call | {"generator": torch.Generator().manual_seed(0)})[0]
        return found

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        changed = {"hidden_states": self.layout.pack(x), "timestep": sigma.expand(len(x)).float()}
        output: Tensor = self.pipe.transformer(**self.inputs | changed)[0]
        return self.layout.unpack(output)


@pytest.fixture(scope="module")
def flux_pair() -> BareFlux:
    return BareFlux()


def test_a_policy_of_a_pipeline_serves_a_loop_of_the_same_network(flux_pair: BareFlux) -> None:
    pipe, call = flux_pair.pipe, {k: v for k, v in flux_pair.call.items() if k not in RESERVED}
    policy = ertacache.profile(pipe, ["a red circle", "a blue square", "a circle"], **call)
    sigmas, noise = flux_pair.sigmas, flux_pair.noise
    full = sample(flux_pair.velocity, noise, sigmas, policy, speedup=1)
    torch.testing.assert_close(flux_pair.layout.pack(full), flux_pair.packed)
    fast = sample(flux_pair.velocity, noise, sigmas, policy, speedup=2)
    with ertacache.attach(pipe, policy, speedup=2):
        same = flux_pair.generate()
    assert not torch.allclose(same, flux_pair.packed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flux_pair.layout.pack(fast), same)


def test_a_policy_of_a_loop_serves_a_pipeline_of_the_same_network(flux_pair: BareFlux) -> None:
    recorder = ertacache.Recorder(flux_pair.sigmas, model="FluxTransformer2DModel")
    for seed in range(3):
        x = torch.randn(flux_pair.noise.shape, generator=torch.Generator().manual_seed(seed))
        run_reference(recorder.wrap(flux_pair.velocity, seed=seed), x, sigmas=flux_pair.sigmas)
    policy = recorder.policy()
    fast = sample(flux_pair.velocity, flux_pair.noise, flux_pair.sigmas, policy, speedup=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ertacache.attach(flux_pair.pipe, policy, speedup=2) as handle:
            same = flux_pair.generate()
    assert handle.stats.last.reused_steps > 0
    torch.testing.assert_close(flux_pair.layout.pack(fast), same)
