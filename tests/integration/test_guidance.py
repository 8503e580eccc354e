"""Guidance of every kind: what the scheduler sees is reused, so none has to be linear."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor

from ertacache.core.plan import TrajectoryPlan
from ertacache.core.sampler import run_trajectory
from ertacache.formats.policy import Policy
from ertacache.integration import attach, fingerprint, nominal, record_run
from tests.integration.setting import COMPUTED, STEPS, Setting, trajectory_plan, watch_steps
from tests.integration.tiny import DIM, awaken, quiet

WORDS = 4


def texts(mask: str, kind: torch.dtype = torch.long) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    there = torch.ones(1, WORDS, dtype=kind)
    return {
        "prompt_embeds": torch.randn(1, WORDS, DIM, generator=generator),
        f"prompt_{mask}": there,
        "negative_prompt_embeds": torch.randn(1, WORDS, DIM, generator=generator),
        f"negative_prompt_{mask}": there,
    }


def without_texts(kind: type, network: torch.nn.Module) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = {"vae": None, "text_encoder": None, "tokenizer": None}
    return quiet(kind(scheduler=scheduler, transformer=awaken(network), **parts))


def qwen() -> tuple[Any, dict[str, Any]]:
    """The combined output gets the norm of the conditional one."""
    network = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=DIM,
        axes_dims_rope=(2, 2, 4),
    )
    call = texts("embeds_mask") | {"height": 32, "width": 32, "true_cfg_scale": 4.0}
    return without_texts(QwenImagePipeline, network), call


def lumina2(**guidance: Any) -> tuple[Any, dict[str, Any]]:
    """Norms again; the second call may be left out on late steps."""
    network = Lumina2Transformer2DModel(
        sample_size=4,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 16, 16),
        cap_feat_dim=DIM,
    )
    call = texts("attention_mask", torch.bool) | {"height": 64, "width": 64, "guidance_scale": 4.0}
    return without_texts(Lumina2Pipeline, network), call | guidance


def ltx() -> tuple[Any, dict[str, Any]]:
    """The combined output gets part of the standard deviation of the conditional one."""
    network = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=DIM,
    )
    size = {"height": 64, "width": 64, "num_frames": 9}
    call = texts("attention_mask") | size | {"guidance_scale": 4.0, "guidance_rescale": 0.7}
    return without_texts(LTXPipeline, network), call


def run_of(pipe: Any, call: dict[str, Any]) -> Callable[[], Tensor]:
    def generate() -> Tensor:
        noise = torch.Generator().manual_seed(0)
        result: Tensor = pipe(**call, generator=noise)[0]
        return result

    call |= {"num_inference_steps": STEPS, "output_type": "latent"}
    return generate


def policy_of(pipe: Any, call: dict[str, Any]) -> Policy:
    run, sigmas = record_run(pipe, **call, generator=torch.Generator().manual_seed(0))
    facts = fingerprint(pipe, sigmas=sigmas, latent_shape=run.latents[0].shape[1:])
    plan = trajectory_plan(nominal(pipe.scheduler), COMPUTED)
    return Policy(plan, sigmas, fingerprint=facts)


@pytest.mark.parametrize("build", [qwen, lumina2, ltx])
def test_guidance_that_is_not_linear(build: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    """The plan's sums of what the scheduler saw, in the calls of the computed steps only."""
    pipe, call = build()
    generate = run_of(pipe, call)
    untouched, policy = generate(), policy_of(pipe, call)
    assert isinstance(policy.plan, TrajectoryPlan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(pipe, policy) as handle, watch_steps(pipe) as seen:
            result = generate()
    outputs = iter([seen.outputs[k] for k in COMPUTED])
    expected = run_trajectory(
        lambda x, sigma: next(outputs), seen.samples[0], sigmas=policy.sigmas, plan=policy.plan
    )
    assert torch.equal(result, expected.latents[-1])
    branches = 1 if build is ltx else 2
    assert handle.stats.last.denoiser_calls == branches * len(COMPUTED)
    assert torch.equal(generate(), untouched)


def test_guidance_that_ends_early() -> None:
    """Lumina 2 with ``cfg_trunc_ratio``: one call per step in the second half, and it is told."""
    pipe, call = lumina2(cfg_trunc_ratio=0.5)
    generate = run_of(pipe, call)
    policy = policy_of(pipe, call)
    with attach(pipe, policy) as handle:
        with pytest.warns(UserWarning, match="step 4 called the network 1 times.* 2 times: a reu"):
            generate()
        assert handle.stats.last.denoiser_calls == 2 * 3 + 2  # steps 0, 1, 3 and 6, 7
        assert handle.stats.last.computed_steps == len(COMPUTED)


def test_true_guidance_between_calls(flux: Setting) -> None:
    """Two calls per step in one run, one in the next: nothing of the first is left."""
    guided = {"true_cfg_scale": 2.0, "negative_prompt": "black"}
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        plain, strong = flux.generate(), flux.generate(**guided)
        assert handle.stats.last.denoiser_calls == 2 * len(COMPUTED)
        assert not torch.equal(plain, strong)
        assert torch.equal(flux.generate(), plain)
        assert torch.equal(flux.generate(**guided), strong)
