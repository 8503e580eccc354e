"""The pipeline: against the public sampler, as a diffusers pipeline, and with a policy attached."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor

import ertacache.models.opensora.conditioning as conditioning_module
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.identity import fingerprint
from ertacache.integration.record import record
from ertacache.models import load_pipeline
from ertacache.models.opensora import OpenSoraPipeline
from ertacache.models.opensora.pipeline import GuidedVelocity
from ertacache.models.opensora.prompts import EncodedText
from ertacache.models.opensora.sizes import Video
from tests.integration.setting import fitted_plan, paper_plan, trajectory_plan
from tests.models.opensora.small import AUTOENCODER, golden, pipeline, transformer

STEPS = 8
COMPUTED = (0, 1, 3, 6, 7)
PROMPT = "a red circle moving left"
VIDEO = Video(32, 32, 5, 24.0)
LATENTS = torch.zeros(1, 2, 2, 4, 4)


@pytest.fixture(scope="module")
def pipe() -> OpenSoraPipeline:
    return pipeline()


def arguments(**changes: Any) -> dict[str, Any]:
    call = {"num_frames": 5, "height": 32, "width": 24, "num_inference_steps": STEPS}
    generator = torch.Generator().manual_seed(0)
    return call | {"output_type": "latent", "generator": generator} | changes


def run(pipe: OpenSoraPipeline, prompt: Any = PROMPT, **changes: Any) -> Any:
    return pipe(prompt, **arguments(**changes)).frames


def public_call(public: dict[str, Tensor]) -> dict[str, Any]:
    given = ("prompt_embeds", "prompt_attention_mask", "latents")
    size = {"height": 48, "width": 75, "num_frames": 34}
    call = {"num_inference_steps": 10, "output_type": "latent"}
    return {name: public[name] for name in given} | size | call


def test_ten_steps_agree_with_the_public_sampler(pipe: OpenSoraPipeline) -> None:
    """The defaults are those of the public configuration: guidance 7, 24 frames per second."""
    public = golden("sampling")
    latents = pipe(**public_call(public)).frames
    torch.testing.assert_close(latents, public["plain"], rtol=0, atol=1e-4)
    torch.testing.assert_close(pipe.scheduler.timesteps, public["timesteps"], rtol=1e-6, atol=0)


def test_conditioned_frames_agree_with_the_public_sampler(
    pipe: OpenSoraPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first frame is kept; one frame per video is generated from half or most of the run on."""
    public = golden("sampling")
    monkeypatch.setattr(conditioning_module, "randn_tensor", lambda *_, **__: public["noise"])
    mask, given = public["conditioning_mask"], public["given"]
    call = public_call(public) | {"conditioning_latents": given, "conditioning_mask": mask}
    latents = pipe(**call).frames
    torch.testing.assert_close(latents, public["conditioned"], rtol=0, atol=1e-4)
    assert torch.equal(latents[:, :, 0], given[:, :, 0])


def test_mask_of_zeros_is_the_default(pipe: OpenSoraPipeline) -> None:
    assert torch.equal(run(pipe), run(pipe, conditioning_mask=torch.zeros(2)))


@pytest.mark.parametrize("num_frames", [1, 5])
def test_outputs(pipe: OpenSoraPipeline, num_frames: int) -> None:
    few = {"num_frames": num_frames, "num_inference_steps": 2}
    pt, array = (run(pipe, output_type=kind, **few) for kind in ("pt", "np"))
    images = run(pipe, output_type="pil", **few)
    assert pt.shape == (1, num_frames, 3, 32, 24)
    assert array.shape == (1, num_frames, 32, 24, 3)
    assert [len(video) for video in images] == [num_frames]
    assert images[0][0].size == (24, 32)
    torch.testing.assert_close(torch.from_numpy(array).permute(0, 1, 4, 2, 3), pt)
    as_tuple = pipe(PROMPT, return_dict=False, **arguments(output_type="pt", **few))
    assert torch.equal(as_tuple[0], pt)


def test_prompts_of_a_batch_are_independent(pipe: OpenSoraPipeline) -> None:
    """Prompts of different lengths in one batch, and two videos of each."""
    prompts = [PROMPT, "a blue square"]
    noise = torch.randn(4, 4, 2, 4, 3)
    together = run(pipe, prompts, latents=noise, num_videos_per_prompt=2)
    for row, prompt in enumerate([prompts[0], prompts[0], prompts[1], prompts[1]]):
        alone = run(pipe, prompt, latents=noise[[row]])
        torch.testing.assert_close(together[[row]], alone, rtol=0, atol=1e-4)


def test_negative_prompt_replaces_the_null_text(pipe: OpenSoraPipeline) -> None:
    plain = run(pipe)
    assert not torch.allclose(run(pipe, negative_prompt="a blue square on black"), plain, atol=0.1)
    same = run(pipe, negative_prompt=PROMPT)  # equal prompts: the scale has no effect
    torch.testing.assert_close(same, run(pipe, guidance_scale=1.0), rtol=0, atol=1e-4)


def test_prompts_are_cleaned_by_default(pipe: OpenSoraPipeline) -> None:
    assert torch.equal(run(pipe, f"<b>{PROMPT}</b>"), run(pipe))
    assert not torch.equal(run(pipe, f"<b>{PROMPT}</b>", clean_caption=False), run(pipe))


def test_callback_changes_latents_and_interrupts(pipe: OpenSoraPipeline) -> None:
    seen = []

    def stop(caller: Any, step: int, t: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((step, float(t)))
        caller._interrupt = step == 2
        return {"latents": given["latents"] + 1}

    interrupted = run(pipe, callback_on_step_end=stop)
    assert seen == list(enumerate(pipe.scheduler.timesteps.tolist()))[:3]
    assert pipe.num_timesteps == STEPS
    assert not torch.equal(interrupted, run(pipe))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_embeds": torch.zeros(1, 2, 24)}, "either prompt or prompt_embeds"),
        ({"output_type": "mp4"}, "output_type must be one of"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "given the latents only"),
        (
            {"latents": torch.zeros(1, 4, 2, 4, 4)},
            r"shape \(1, 4, 2, 4, 3\), got \(1, 4, 2, 4, 4\)",
        ),
        ({"height": 4}, "at least 8 pixels"),
        ({"height": None}, "both height and width"),
        ({"negative_prompt": ["a", "b", "c"]}, "1 prompts, but 3 negative prompts"),
        ({"conditioning_mask": torch.ones(2)}, "needs conditioning_latents"),
        ({"num_inference_steps": 0}, "num_inference_steps must be at least 1"),
    ],
)
def test_bad_arguments(pipe: OpenSoraPipeline, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(pipe, **changes)


def test_round_trip_through_a_folder(pipe: OpenSoraPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    again = OpenSoraPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(run(again), run(pipe))


def test_folder_names_the_modules_of_its_parts(pipe: OpenSoraPipeline, tmp_path: Path) -> None:
    """They are imported on loading; only the pipeline class itself must be passed to diffusers."""
    pipe.save_config(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    for name, module in (
        ("transformer", "transformer"),
        ("vae", "vae"),
        ("scheduler", "scheduler"),
    ):
        kind = type(getattr(pipe, name)).__name__
        assert index[name] == [f"ertacache.models.opensora.{module}", kind]
    with pytest.raises(AttributeError, match="no attribute OpenSoraPipeline"):
        DiffusionPipeline.from_pretrained(tmp_path)


def test_published_files_make_the_same_pipeline(pipe: OpenSoraPipeline, tmp_path: Path) -> None:
    for name in ("transformer", "vae"):
        save_file(getattr(pipe, name).state_dict(), tmp_path / f"{name}.safetensors")
    for part in (pipe.text_encoder, pipe.tokenizer):
        part.save_pretrained(tmp_path / "t5")
    codec = type(pipe.vae).from_original(tmp_path / "vae.safetensors", **AUTOENCODER)
    again = OpenSoraPipeline.from_original(
        transformer=transformer(), vae=codec, text_encoder=tmp_path / "t5"
    )
    again.set_progress_bar_config(disable=True)
    assert torch.equal(run(again), run(pipe))


@pytest.fixture(scope="module")
def policies(pipe: OpenSoraPipeline) -> dict[str, Policy]:
    found = record(pipe, prompt=PROMPT, **arguments())
    facts = fingerprint(pipe, latent_shape=found.run.latents[0].shape[1:])
    plans = {
        "trajectory": trajectory_plan(found.schedule.nominal, COMPUTED),
        "paper": paper_plan(found.schedule.sigmas, COMPUTED),
    }
    return {
        name: Policy(facts, plans=(fitted_plan(plan, found.schedule),))
        for name, plan in plans.items()
    }


@pytest.mark.parametrize("method", ["trajectory", "paper"])
def test_policy_reduces_evaluations_and_detaches_completely(
    pipe: OpenSoraPipeline, policies: dict[str, Policy], method: str
) -> None:
    before = run(pipe)
    calls: list[int] = []
    hook = pipe.transformer.final_layer.register_forward_hook(lambda *_: calls.append(1))
    with attach(pipe, policies[method]) as handle:
        reused = run(pipe)
    hook.remove()
    assert len(calls) == len(COMPUTED)
    assert handle.stats.last.reused_steps == STEPS - len(COMPUTED)
    assert torch.isfinite(reused).all()
    assert not torch.equal(reused, before)
    assert torch.equal(run(pipe), before)


def test_policy_without_reuse_is_the_full_run(
    pipe: OpenSoraPipeline, policies: dict[str, Policy]
) -> None:
    sigmas = policies["trajectory"].default.sigmas
    everything = paper_plan(sigmas, range(STEPS), scale=1.0, rectified=False)
    policy = replace(policies["trajectory"], plans=(FittedPlan(everything, sigmas),))
    with attach(pipe, policy):
        attached = run(pipe)
    assert torch.equal(attached, run(pipe))


def test_policy_keeps_conditioning_frames(
    pipe: OpenSoraPipeline, policies: dict[str, Policy]
) -> None:
    given = torch.randn(1, 4, 2, 4, 3)
    frames = {"conditioning_latents": given, "conditioning_mask": torch.tensor([1.0, 0.0])}
    with attach(pipe, policies["trajectory"]):
        latents = run(pipe, **frames)
    assert torch.equal(latents[:, :, 0], given[:, :, 0])
    assert not torch.equal(latents[:, :, 1], given[:, :, 1])


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, ertacache.models.opensora as o; dir(o); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "diffusers", "transformers", "safetensors"}


def test_a_saved_folder_loads_like_any_other_model(pipe: OpenSoraPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    assert isinstance(load_pipeline(tmp_path), OpenSoraPipeline)


class Network:
    """Outputs the mean of the text, and a variance that must be ignored."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, hidden_states: Tensor, **call: Any) -> tuple[Tensor]:
        latents = hidden_states
        self.calls.append(call | {"latents": latents})
        text = call["encoder_hidden_states"].mean(dim=(1, 2)).view(-1, 1, 1, 1, 1)
        return (torch.cat([latents + text, latents + 1e6], dim=1),)


def test_guidance_scales_the_text_in_the_first_half() -> None:
    network = Network()
    text = EncodedText.of(torch.tensor([3.0, 1.0]).view(2, 1, 1), None)
    v = GuidedVelocity(network, text, VIDEO, 7.0)(LATENTS, torch.tensor(900.0), None)
    assert v.shape == LATENTS.shape
    assert v.unique().item() == 1 + 7 * (3 - 1)
    (call,) = network.calls  # both halves in one call
    assert call["latents"].shape[0] == 2
    assert call["timestep"].tolist() == [900.0, 900.0]


def test_without_guidance_only_the_text_is_evaluated() -> None:
    network = Network()
    text = EncodedText.of(torch.full((1, 1, 1), 3.0), None)
    generated = torch.tensor([[False, True]])
    v = GuidedVelocity(network, text, VIDEO, None)(LATENTS, torch.tensor(900.0), generated)
    assert v.unique().item() == 3
    assert torch.equal(network.calls[0]["frame_mask"], generated)
