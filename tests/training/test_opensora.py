"""The components of `emoji-opensora`, untrained: training and pipeline compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ertacache.models import load_pipeline
from ertacache.models.opensora import OpenSoraPipeline, clean_prompt
from ertacache.models.opensora.blocks import rotate
from training.autoencoders import AUTOENCODERS, AutoencoderTask
from training.data import all_words, caption, render, scenes
from training.denoisers import DENOISERS, DenoiserTask
from training.objectives import sample
from training.opensora import OpenSoraParts, look_around
from training.patches import SPACES, PatchBasis, frame_basis
from training.subjects import SUBJECTS

PROMPTS = [
    "a small star on a red background moving left",
    "a large cat on a blue background spinning",
]
CALL = {"height": 32, "width": 32, "num_frames": 17}


@pytest.fixture(autouse=True)
def _no_font(monkeypatch: pytest.MonkeyPatch):
    """Glyphs of noise, so that no font is needed."""
    glyphs = torch.rand(len(SUBJECTS), 4, 72, 72, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("training.data._glyphs", lambda: glyphs)
    yield
    frame_basis.cache_clear()


@pytest.fixture(scope="module")
def parts() -> OpenSoraParts:
    torch.manual_seed(0)
    built = DENOISERS["emoji-opensora"].build()
    for module in built.modules.values():  # zero-initialised layers would hide a difference
        for parameter in module.parameters():
            if parameter.requires_grad and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
    built.modules.eval()
    return built


@pytest.fixture(scope="module")
def pipe(parts: OpenSoraParts) -> OpenSoraPipeline:
    pipe = parts.pipeline(AUTOENCODERS["opensora"].build().eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def basis() -> PatchBasis:
    vectors = torch.linalg.qr(torch.randn(192, 16, generator=torch.Generator().manual_seed(0)))[0]
    return PatchBasis(torch.zeros(192), vectors.T.contiguous(), vectors)


def test_first_call_of_the_pipeline_is_predict(parts: OpenSoraParts, pipe: OpenSoraPipeline):
    """Both halves of the batch: the prompts, and the null text that guidance steers away from."""
    calls = []

    def keep(_module, _args, given, output):
        calls.append((given, output[0]))

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    pipe(PROMPTS, num_inference_steps=2, output_type="latent", **CALL)
    hook.remove()
    given, output = calls[0]
    assert given["frame_mask"] is None
    ids = parts.tokenize(PROMPTS)
    dropped = parts.drop(torch.tensor([True, True]), ids, parts.tokenize([""]))
    both = tuple(torch.cat(pair) for pair in zip(ids, dropped, strict=True))
    with torch.no_grad():
        predicted = parts.predict(given["hidden_states"], given["timestep"], both)
    assert predicted.shape == (4, 16, 5, 8, 8)
    assert (output[:2] - output[2:]).abs().max() > 1e-3
    torch.testing.assert_close(predicted, output, rtol=0, atol=1e-5)


def test_levels_and_steps_are_those_of_the_scheduler(parts: OpenSoraParts, pipe: OpenSoraPipeline):
    """A preview without guidance is a run of the pipeline without guidance."""
    noise = torch.randn(2, 16, 5, 8, 8)
    found = pipe(
        PROMPTS,
        latents=noise,
        num_inference_steps=4,
        guidance_scale=1.0,
        output_type="latent",
        **CALL,
    ).frames
    ids = parts.tokenize(PROMPTS)
    wanted = sample(parts.objective, lambda x, t: parts.predict(x, t, ids), noise, steps=4)
    torch.testing.assert_close(parts.objective.path(4)[:-1], pipe.scheduler.timesteps)
    torch.testing.assert_close(wanted, found, rtol=1e-4, atol=1e-4)


def test_target_points_from_noise_to_data(parts: OpenSoraParts, pipe: OpenSoraPipeline):
    data, noise = torch.randn(2, 1, 16, 5, 8, 8)
    half = torch.tensor(500.0)
    a, s = parts.objective.factors(half)
    velocity = parts.objective.target(data, noise, a, s)
    pipe.scheduler.set_timesteps(1, **CALL)
    moved = pipe.scheduler.step(velocity, pipe.scheduler.timesteps[0], noise).prev_sample
    torch.testing.assert_close(moved, data)
    noisy = pipe.scheduler.add_noise(data, noise, half[None])
    torch.testing.assert_close(noisy, a * data + s * noise)
    for end, wanted in zip(
        parts.objective.split(noisy, velocity, a, s), (data, noise), strict=True
    ):
        torch.testing.assert_close(end, wanted)


def test_a_dropped_caption_keeps_only_its_length(parts: OpenSoraParts):
    latents, level = torch.randn(1, 16, 5, 8, 8).expand(3, -1, -1, -1, -1), torch.full((3,), 500.0)
    captions = [PROMPTS[0], PROMPTS[0].replace("star", "cat"), PROMPTS[0] + " a"]
    ids = parts.drop(torch.ones(3, dtype=torch.bool), parts.tokenize(captions), ())
    with torch.no_grad():
        one, same, longer = parts.predict(latents, level, ids)
    torch.testing.assert_close(one, same)
    assert not torch.allclose(one, longer, atol=1e-5)


def test_cleaning_and_truncation_keep_every_caption(parts: OpenSoraParts):
    captions = [caption(s) for split in ("train", "test") for s in scenes(split, video=True)]
    assert [c for c in captions if clean_prompt(c) != c] == []
    tokens, mask = parts.tokenize(captions)
    assert mask[:, -1].sum() == 0  # none is truncated
    assert (tokens == parts.tokenizer.unk_token_id).sum() == 0
    assert set(" ".join(captions).split()) <= set(all_words())


@pytest.mark.parametrize("step", [0, 1, 2])
def test_autoencoder_task_trains_every_stage(basis: PatchBasis, step: int):
    """Step 0 also encodes, step 2 takes a whole video."""
    torch.manual_seed(0)
    task = AutoencoderTask(AUTOENCODERS["opensora"], basis)
    pixels = task.draw(step)
    assert pixels.shape == ((1, 3, 17, 32, 32) if step == 2 else (8, 3, 17, 16, 16))
    vae = task.modules["vae"]
    assert vae.encode(pixels).latent_dist.mean.shape == basis.encode(pixels).shape
    task.loss(step).backward()
    learning = {key.split(".decoder")[0] for key, p in vae.named_parameters() if p.grad is not None}
    assert {"spatial_vae.module", "temporal_vae"} <= learning
    encoders = [p for key, p in vae.named_parameters() if ".encoder." in key]
    assert all((p.grad is not None) == (step == 0) for p in encoders)


def test_latents_of_the_autoencoder_are_not_rescaled():
    vae = AUTOENCODERS["opensora"].build().eval()
    space = SPACES["video"]
    pixels = render(scenes("train", video=True)[:1], space.side, seed=0, frames=space.frames)
    with torch.no_grad():
        raw = vae.temporal_vae.encode(vae.spatial_vae.encode(pixels, None)).chunk(2, dim=1)[0]
        assert torch.equal(vae.encode(pixels).latent_dist.mean, raw)
        assert vae.decode(raw).sample.shape == pixels.shape  # one micro frame: no count needed
    assert raw.shape == (1, 16, 5, 8, 8)
    assert vae.spatial_compression_ratio == 4


def test_folder_loads_and_runs(pipe: OpenSoraPipeline, tmp_path: Path):
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "OpenSoraPipeline"
    again = load_pipeline(tmp_path)
    runs = [
        p(PROMPTS, generator=torch.Generator().manual_seed(0), num_inference_steps=2, **CALL)
        for p in (pipe, again)
    ]
    first, second = (run.frames for run in runs)
    assert [len(video) for video in first] == [17, 17]
    assert first[0][0].size == (32, 32)
    assert first == second


def test_task_drops_through_the_parts(parts: OpenSoraParts, basis: PatchBasis, monkeypatch):
    """One batch of the denoiser's task, on a bank of noise."""
    count = len(scenes("train", video=True))
    monkeypatch.setattr("training.denoisers.bank", lambda *_: torch.randn(1, count, 16, 5, 8, 8))
    monkeypatch.setattr("training.denoisers.patch_basis", lambda *_: basis)
    task = DenoiserTask(parts, Path(), batch=8)
    monkeypatch.setattr("training.denoisers._DROPOUT", 1.0)
    seen = []
    real = parts.predict
    monkeypatch.setattr(parts, "predict", lambda x, t, ids: seen.append(ids) or real(x, t, ids))
    torch.manual_seed(0)
    assert torch.isfinite(task.loss(0))
    tokens, mask = seen[0]
    assert not tokens.any()
    assert (mask.sum(1) > 1).all()


def test_heads_are_initialised_to_attend_to_certain_frames(parts: OpenSoraParts) -> None:
    """The previous, the next, the first and the last frame, for any content."""
    transformer = parts.modules["transformer"]
    look_around(transformer)
    attention, frames = transformer.temporal_blocks[0].attn, 5
    x = torch.randn(1, frames, 128, generator=torch.Generator().manual_seed(0))
    query, key, _ = attention.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    rotary = transformer.rope(frames)
    query, key = rotate(attention.q_norm(query), rotary), rotate(attention.k_norm(key), rotary)
    attended = (query @ key.transpose(-1, -2))[0].argmax(-1)
    assert attended[0, 1:].tolist() == [0, 1, 2, 3]
    assert attended[1, :4].tolist() == [1, 2, 3, 4]
    assert attended[2].tolist() == [0] * 5
    assert attended[3].tolist() == [4] * 5
