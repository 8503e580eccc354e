"""The functions of our samplers, without ComfyUI."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ertacache
from ertacache import Policy, PolicyError
from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.guided import GuidedCoefficients
from ertacache.integration.loops import Loop
from tests.comfyui.stand_ins import SHAPE, Guider, Inpaint, KSampler, Patcher, load_pack
from tests.core import samplers

SIGMAS = torch.linspace(1, 0, 13)


def ready_model() -> Inpaint:
    guider = Guider(Patcher())
    guider.set_conds([(torch.full((1, 2), 0.3), {})], [])
    model = Inpaint(guider, SIGMAS)
    model.noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    model.latent_image = torch.full(SHAPE, 0.7)
    return model


@pytest.fixture(scope="module")
def policy() -> Policy:
    def denoise_for(prompt: str) -> Any:
        model = ready_model()
        model.inner_model.conds["positive"][0]["level"] = 0.1 * len(prompt)
        return ertacache.integration.sample.denoise_of(model, denoise_mask=None)

    loop = Loop(denoise_for, SIGMAS, SHAPE[1:])
    return ertacache.calibrate(loop, ["a", "ab", "abc", "abcd"], speedup=2)


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return load_pack(monkeypatch, tmp_path).nodes


def run(sampler: Any, model: Inpaint, mask: Tensor | None = None) -> tuple[Tensor, int]:
    before = model.inner_model.calls
    sigmas = SIGMAS.clone()
    extra = {"denoise_mask": mask, "model_options": {}, "seed": 0}
    latent = sampler.sampler_function(
        model, model.noise.clone(), sigmas, extra_args=extra, callback=None, disable=True
    )
    return latent, model.inner_model.calls - before


def test_all_steps_computed_is_the_base(sampling: Any, policy: Policy) -> None:
    model, base = ready_model(), KSampler(samplers.dpmpp_2m, {}, {"random": True})
    ours = sampling.accelerate(policy, base, 1.0)
    assert ours.inpaint_options == {"random": True}
    found, calls = run(ours, model)
    assert torch.equal(found, run(base, model)[0])
    assert calls == 12


@pytest.mark.parametrize("name", ["euler", "dpmpp_2m"])
def test_half_of_the_steps_come_near(sampling: Any, policy: Policy, name: str) -> None:
    model, base = ready_model(), KSampler(getattr(samplers, name))
    full, _ = run(base, model)
    fast, calls = run(sampling.accelerate(policy, base, 2.0), model)
    assert calls == 6
    assert (fast - full).square().mean().sqrt() < 0.02 * full.std()


def test_what_a_mask_protects_stays(sampling: Any, policy: Policy) -> None:
    model, base = ready_model(), KSampler(samplers.euler)
    mask = torch.zeros(SHAPE)
    mask[..., :3] = 1
    full, _ = run(base, model, mask)
    fast, calls = run(sampling.accelerate(policy, base, 2.0), model, mask)
    assert calls == 6
    torch.testing.assert_close(fast[..., 3:], model.latent_image[..., 3:])
    assert (fast - full).square().mean().sqrt() < 0.02 * full.std()


def test_a_base_that_changes_its_last_sigma_is_scaled_by_it(sampling: Any, policy: Policy) -> None:
    def ends_early(model: Any, x: Tensor, sigmas: Tensor, **options: Any) -> Tensor:
        sigmas[-1] = 0.001
        return samplers.euler(model, x, sigmas, **options)

    model, sigmas = ready_model(), SIGMAS.clone()
    wanted = ends_early(model, model.noise, sigmas, extra_args={"denoise_mask": None})
    wanted = wanted / (1 - sigmas[-1])  # as ComfyUI does with every result
    same = run(sampling.accelerate(policy, KSampler(ends_early), 1.0), model)[0]
    assert torch.equal(same, wanted)
    ours = sampling.accelerate(policy, KSampler(ends_early), 2.0)
    for _ in range(2):  # the second run takes the plan of the first
        sigmas = SIGMAS.clone()
        found = ours.sampler_function(model, model.noise, sigmas, extra_args={"denoise_mask": None})
        assert torch.equal(sigmas, SIGMAS)  # they may be those of the next run
        assert (found - wanted).square().mean().sqrt() < 0.02 * wanted.std()


def test_previews_show_what_those_of_the_full_run_show(sampling: Any, policy: Policy) -> None:
    model, base = ready_model(), KSampler(samplers.euler)
    shown: dict[str, list[Any]] = {"full": [], "fast": []}
    for name, sampler in (("full", base), ("fast", sampling.accelerate(policy, base, 2.0))):
        sampler.sampler_function(
            model, model.noise.clone(), SIGMAS.clone(), {"denoise_mask": None}, shown[name].append
        )
    assert [report["i"] for report in shown["fast"]] == list(range(12))
    for fast, full in zip(shown["fast"], shown["full"], strict=True):
        error = (fast["denoised"] - full["denoised"]).square().mean().sqrt()
        assert error < 0.15 * full["denoised"].std()  # of a preview


def test_samplers_that_cannot_be_followed_are_refused(sampling: Any, policy: Policy) -> None:
    with pytest.raises(PolicyError, match="Custom is not a sampler function of ComfyUI"):
        sampling.accelerate(policy, type("Custom", (), {})(), 2.0)
    ours = sampling.accelerate(policy, KSampler(samplers.euler), 2.0)
    with pytest.raises(PolicyError, match="follows a policy already"):
        sampling.accelerate(policy, ours, 2.0)
    noisy = sampling.accelerate(policy, KSampler(add_noise), 2.0)
    with pytest.raises(PolicyError, match="adds noise on its way"):
        run(noisy, ready_model())


def add_noise(model: Any, x: Tensor, sigmas: Tensor, **options: Any) -> Tensor:
    return samplers.euler(model, x, sigmas, **options) + torch.randn_like(x)


def test_a_policy_of_another_model_is_refused(sampling: Any, policy: Policy) -> None:
    other = replace(policy, provenance={"ComfyUI model": "WAN21"})
    ours = sampling.accelerate(other, KSampler(samplers.euler), 2.0)
    with pytest.raises(PolicyError, match="for WAN21, but the model is Flux"):
        run(ours, ready_model())


def test_another_kind_of_network_is_refused(sampling: Any, policy: Policy) -> None:
    model = ready_model()
    model.inner_model.inner_model.model_sampling = object()
    ours = sampling.accelerate(policy, KSampler(samplers.euler), 2.0)
    with pytest.raises(PolicyError, match="prediction is 'epsilon', was 'flow'"):
        run(ours, model)


@pytest.mark.parametrize(
    "guidance", [{"cfg": (2.0,)}, {"guidance_scale": (3.5,), "true_cfg_scale": (2.0,)}]
)
def test_another_cfg_is_logged(
    sampling: Any,
    policy: Policy,
    caplog: pytest.LogCaptureFixture,
    guidance: dict[str, tuple[float, ...]],
) -> None:
    facts = replace(policy.fingerprint, guidance=guidance)
    ours = sampling.accelerate(replace(policy, fingerprint=facts), KSampler(samplers.euler), 2.0)
    model = ready_model()
    for cfg, warned in ((2.0, False), (7.0, True)):
        model.inner_model.set_cfg(cfg)
        with caplog.at_level(logging.WARNING):
            run(ours, model)
        assert ("conditions: cfg is 7.0, was 2.0; compare" in caplog.text) == warned


@pytest.mark.parametrize("argument", ["cfg", "true_cfg_scale"])
def test_a_run_takes_the_coefficients_of_its_cfg(
    sampling: Any, policy: Policy, argument: str
) -> None:
    """Under the name that the policy has for it, whoever calibrated."""
    known = policy.default
    assert isinstance(known.plan, TrajectoryPlan)
    z = known.plan.coefficients
    own = GuidedCoefficients(argument, (2.0, 4.0), torch.stack([torch.zeros_like(z), z]))
    facts = replace(policy.fingerprint, guidance={argument: (2.0, 4.0)})
    listed = replace(policy, plans=(replace(known, guided=own),), fingerprint=facts)
    plain, ours = (
        sampling.accelerate(each, KSampler(samplers.euler), known.speedup)
        for each in (replace(policy, plans=(known,)), listed)
    )
    model = ready_model()
    model.inner_model.set_cfg(4.0)
    expected, _ = run(plain, model)
    assert torch.equal(run(ours, model)[0], expected)
    model.inner_model.set_cfg(2.0)
    assert not torch.allclose(run(ours, model)[0], expected, rtol=0.1, atol=0.1)


def test_packed_latents_of_another_size_are_refused(sampling: Any, policy: Policy) -> None:
    ours = sampling.accelerate(policy, KSampler(samplers.euler), 2.0)
    with pytest.raises(PolicyError, match="calibrate at this size"):
        ours.sampler_function(ready_model(), torch.zeros(1, 1, 50), SIGMAS.clone())


def test_a_model_takes_over_only_what_it_can(
    sampling: Any, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    start, given = sampling.take_over(policy, 2.0), []

    def executor(noise: Any, latent: Any, sampler: Any, *rest: Any, **named: Any) -> Any:
        given.append((rest, named))
        return run(sampler, ready_model())

    euler = KSampler(samplers.euler)
    assert start(executor, None, None, euler, SIGMAS, latent_shapes=[SHAPE])[1] == 6
    assert given == [((SIGMAS,), {"latent_shapes": [SHAPE]})]
    with caplog.at_level(logging.WARNING):
        assert start(executor, None, None, KSampler(add_noise), SIGMAS)[1] == 12
    assert "ERTACache leaves this run alone: the sampler adds noise" in caplog.text
    ours = sampling.accelerate(policy, euler, 3.0)
    assert start(executor, None, None, ours, SIGMAS)[1] == 4


def test_a_model_keeps_its_plans_from_run_to_run(
    sampling: Any, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    start, euler = sampling.take_over(policy, 2.0), KSampler(samplers.euler)

    def executor(noise: Any, latent: Any, sampler: Any, *rest: Any) -> Any:
        return sampler.sampler_function, run(sampler, ready_model())[0]

    other = torch.linspace(1, 0, 11)
    with caplog.at_level(logging.INFO):
        found = [start(executor, None, None, euler, other) for _ in range(3)]
    assert len({id(function) for function, _ in found}) == 1
    assert all(torch.equal(latent, found[0][1]) for _, latent in found)


def test_a_sampler_object_of_another_kind_is_left_alone(
    sampling: Any, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    other = type("Custom", (), {})()
    start = sampling.take_over(policy, 2.0)
    assert start(lambda noise, latent, sampler: sampler, None, None, other) is other
    assert "Custom is not a sampler function of ComfyUI" in caplog.text
