"""The nodes on a real server: equality, speed and nearness to the full run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import ertacache
from ertacache.integration.loops import Loop
from tests.comfyui.live.comparing import SEED, full, image_psnr, ours, sample
from tests.comfyui.live.conftest import STEPS, folder
from tests.comfyui.live.server import Server, WorkflowError
from tests.comfyui.live.workflows import CFG, Graph, Link

HALF = STEPS // 2
NEAR = 35.0  # dB; fewer steps reach less than 30 here
SAMPLERS = ["euler", "dpmpp_2m", "uni_pc"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_all_steps_computed_is_the_built_in_sampler(server: Server, policy: str, name: str) -> None:
    built_in = sample(server, full(name, steps=STEPS))
    same = sample(server, ours(policy, 1.0, name, steps=STEPS))
    assert torch.equal(same.latent, built_in.latent)
    assert same.calls == built_in.calls == STEPS


@pytest.mark.parametrize("name", [*SAMPLERS, "deis", "res_multistep", "ipndm"])
def test_half_of_the_steps_reach_nearly_the_same_image(
    server: Server, policy: str, name: str
) -> None:
    built_in = sample(server, full(name, steps=STEPS))
    fast = sample(server, ours(policy, 2.0, name, steps=STEPS))
    assert fast.calls == HALF
    assert image_psnr(fast.latent, built_in.latent) > NEAR


def test_a_sampler_with_two_evaluations_per_step(server: Server, policy: str) -> None:
    built_in = sample(server, full("dpm_2", steps=HALF))
    fast = sample(server, ours(policy, 1.5, "dpm_2", steps=HALF))
    assert fast.calls < built_in.calls
    assert image_psnr(fast.latent, built_in.latent) > NEAR


def test_other_numbers_of_steps(server: Server, policy: str) -> None:
    built_in = sample(server, full(steps=16))
    fast = sample(server, ours(policy, 2.0, steps=16))
    assert fast.calls == 8
    assert image_psnr(fast.latent, built_in.latent) > NEAR


def test_sampler_custom(server: Server, policy: str) -> None:
    def build(graph: Graph, positive: Link) -> Link:
        node = graph.add(
            "SamplerCustom",
            model=graph.model,
            add_noise=True,
            noise_seed=SEED,
            cfg=CFG,
            positive=positive,
            negative=graph.encode(""),
            sampler=graph.sampler(policy, 2.0),
            sigmas=graph.sigmas(STEPS),
            latent_image=graph.empty(),
        )
        return [node, 0]

    fast = sample(server, ours(policy, 2.0, steps=STEPS))
    assert torch.equal(sample(server, build).latent, fast.latent)


def ksampler(policy: str | None, name: str) -> object:
    def build(graph: Graph, positive: Link) -> Link:
        if policy is not None:
            options = {"model": graph.model, "policy": policy, "speedup": 2.0}
            graph.model = [graph.add("ERTACacheModel", **options), 0]
        return graph.ksampler(positive, SEED, name=name, steps=STEPS)

    return build


def test_ksampler_with_a_patched_model(server: Server, policy: str) -> None:
    built_in = sample(server, ksampler(None, "euler"))
    fast = sample(server, ksampler(policy, "euler"))
    assert fast.calls == HALF
    assert image_psnr(fast.latent, built_in.latent) > NEAR


@pytest.mark.parametrize("name", ["euler_ancestral", "dpmpp_sde", "dpm_adaptive", "lcm"])
def test_ksampler_leaves_other_samplers_alone(server: Server, policy: str, name: str) -> None:
    before = len(server.log())
    patched = sample(server, ksampler(policy, name))
    said = server.log()[before:]
    built_in = sample(server, ksampler(None, name))
    assert torch.equal(patched.latent, built_in.latent)
    assert patched.calls == built_in.calls
    assert "ERTACache leaves this run alone: the sampler" in said


def test_a_batch(server: Server, policy: str) -> None:
    def build(accelerate: bool) -> object:
        def add(graph: Graph, positive: Link) -> Link:
            sampler = graph.sampler(policy, 2.0) if accelerate else graph.base()
            options = {"sampler": sampler, "sigmas": graph.sigmas(STEPS)}
            return graph.sample(positive, SEED, latent=graph.empty(3), **options)

        return add

    built_in, fast = sample(server, build(False)), sample(server, build(True))
    assert fast.latent.shape == (3, 20, 16, 16)
    assert fast.calls == HALF
    for one, other in zip(fast.latent, built_in.latent, strict=True):
        assert image_psnr(one[None], other[None]) > NEAR


def from_image(graph: Graph) -> Link:
    """The latent of a plain image that is half grey, half white."""
    half = {"width": 64, "height": 32, "batch_size": 1}
    dark = graph.add("EmptyImage", color=0x808080, **half)
    light = graph.add("EmptyImage", color=0xFFFFFF, **half)
    sides = {"image1": [dark, 0], "image2": [light, 0], "direction": "down"}
    both = graph.add(
        "ImageStitch", **sides, match_image_size=True, spacing_width=0, spacing_color="white"
    )
    return [graph.add("VAEEncode", pixels=[both, 0], vae=graph.vae), 0]


def test_an_image_to_begin_with(server: Server, policy: str) -> None:
    def build(accelerate: bool) -> object:
        def add(graph: Graph, positive: Link) -> Link:
            options = {
                "sampler": graph.sampler(policy, 2.0) if accelerate else graph.base(),
                "sigmas": graph.sigmas(STEPS, denoise=0.7),
                "latent": from_image(graph),
            }
            return graph.sample(positive, SEED, **options)

        return add

    built_in, fast = sample(server, build(False)), sample(server, build(True))
    assert fast.calls == HALF
    assert image_psnr(fast.latent, built_in.latent) > NEAR


def test_a_mask_keeps_the_rest_of_the_image(server: Server, policy: str) -> None:
    def build(accelerate: bool | None) -> object:
        def add(graph: Graph, positive: Link) -> Link:
            original = from_image(graph)
            if accelerate is None:
                return original
            left = graph.add("SolidMask", value=1.0, width=32, height=64)
            all_ = graph.add("SolidMask", value=0.0, width=64, height=64)
            place = {"x": 0, "y": 0, "operation": "add"}
            mask = graph.add("MaskComposite", destination=[all_, 0], source=[left, 0], **place)
            masked = graph.add("SetLatentNoiseMask", samples=original, mask=[mask, 0])
            sampler = graph.sampler(policy, 2.0) if accelerate else graph.base()
            options = {"sampler": sampler, "sigmas": graph.sigmas(STEPS)}
            return graph.sample(positive, SEED, latent=[masked, 0], **options)

        return add

    original = sample(server, build(None)).latent
    built_in, fast = sample(server, build(False)), sample(server, build(True))
    assert fast.calls == HALF
    assert image_psnr(fast.latent, built_in.latent) > NEAR
    torch.testing.assert_close(fast.latent[..., 8:], original[..., 8:])
    assert (fast.latent - original)[..., :8].abs().max() > 0.1


def ring(prompt: str, **arguments: object) -> object:
    """The velocity of the probe's guider."""

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        pairs = x.reshape(len(x), -1, 2)
        found = pairs / pairs.norm(dim=-1, keepdim=True).clamp_min(1e-3)
        return (x - (found * (1 - 0.5 * sigma)).reshape(x.shape)) / sigma

    return velocity


def sample_nested(server: Server, policy: str | None, length: int) -> tuple[torch.Tensor, object]:
    graph = Graph()
    sampler = graph.base() if policy is None else graph.sampler(policy, 2.0)
    inputs = {"model": graph.model, "sigmas": graph.sigmas(STEPS), "length": length}
    node = graph.add("ProbeSampleNested", sampler=sampler, **inputs)
    saved = graph.add("SaveLatent", samples=[node, 0], filename_prefix="nested")
    found = server.run(graph.nodes)
    return found.latent(saved), found.outputs[node]


def test_latents_of_several_parts(server: Server, policy: str) -> None:
    """Video and sound of one model, which ComfyUI packs into one row."""
    built_in, facts = sample_nested(server, None, 6)
    assert facts["shapes"] == [[1, 8, 6, 4, 4], [1, 4, 12]]
    sigmas = torch.tensor([3 * s / (1 + 2 * s) for s in torch.linspace(1, 0, STEPS + 1).tolist()])
    loop = Loop(ring, sigmas, (1, built_in.numel()))
    nested = ertacache.calibrate(loop, ["a", "b", "c", "d"], speedup=2)
    nested.save(folder(server) / "nested.safetensors")
    fast, facts = sample_nested(server, "nested.safetensors", 6)
    assert facts["calls"] == [HALF]
    assert facts["steps"] == list(range(STEPS))
    assert facts["kinds"] == ["NestedTensor"]
    error = (fast - built_in).square().mean().sqrt()
    assert error < 0.02 * built_in.std()
    with pytest.raises(WorkflowError, match="calibrate at this size"):
        sample_nested(server, "nested.safetensors", 7)


def test_a_lora(server: Server, policy: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = "diffusion_model.double_blocks.0.img_attn.qkv"
    weights = {
        f"{layer}.lora_A.weight": 0.1 * torch.randn(4, 128, generator=generator),
        f"{layer}.lora_B.weight": 0.1 * torch.randn(384, 4, generator=generator),
    }
    folder = server.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "test.safetensors")

    def build(strength: float, accelerate: bool) -> object:
        def add(graph: Graph, positive: Link) -> Link:
            options = {"lora_name": "test.safetensors", "strength_model": strength}
            graph.model = [graph.add("LoraLoaderModelOnly", model=graph.model, **options), 0]
            sampler = graph.sampler(policy, 2.0) if accelerate else graph.base()
            return graph.sample(positive, SEED, sampler=sampler, sigmas=graph.sigmas(STEPS))

        return add

    without, built_in = sample(server, build(0.0, False)), sample(server, build(1.0, False))
    fast = sample(server, build(1.0, True))
    assert fast.calls == HALF
    assert not torch.equal(built_in.latent, without.latent)
    assert image_psnr(fast.latent, built_in.latent) > NEAR


def test_a_model_that_was_unloaded(server: Server, policy: str) -> None:
    first = sample(server, ours(policy, 2.0, steps=STEPS))
    server.post("/free", {"unload_models": True, "free_memory": True})
    again = sample(server, ours(policy, 2.0, steps=STEPS))
    assert again.calls == HALF
    assert torch.equal(again.latent, first.latent)
