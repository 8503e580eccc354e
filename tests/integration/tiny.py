"""Complete diffusers pipelines of random weights, small enough to build and run in a moment.

Networks, schedulers and autoencoders are those of the compatibility tests; text encoders and
tokenizers are built here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    CogVideoXPipeline,
    FluxPipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.compatibility import components
from tests.compatibility.components import awaken, quiet

__all__ = [
    "CASES",
    "DIM",
    "STEPS",
    "WORDS",
    "Case",
    "awaken",
    "call_arguments",
    "generate",
    "quiet",
    "t5",
    "tokenizer",
]

STEPS = 8
WORDS = ("a", "red", "blue", "circle", "square", "moving", "left", "on", "black")
DIM = 16


@dataclass(frozen=True)
class Case:
    """A pipeline and the arguments that make a short run of it."""

    build: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)


def generate(pipe: Any, case: Case, *, seed: int = 0, **changes: Any) -> Tensor:
    """The final latents of one run."""
    out = pipe(**call_arguments(case, seed=seed, **changes))
    latents: Tensor = out[0]
    return latents


def call_arguments(case: Case, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    fixed = {
        "prompt": "a red circle moving left",
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "max_sequence_length": 8,
        "generator": torch.Generator().manual_seed(seed),
    }
    return fixed | case.arguments | changes


def flux() -> FluxPipeline:
    words = tokenizer()
    return quiet(
        FluxPipeline(
            scheduler=components.flow().build(),
            text_encoder=clip(words),
            tokenizer=words,
            text_encoder_2=t5(words),
            tokenizer_2=words,
            vae=own(components.image_vae),
            transformer=components.flux().build(),
        )
    )


def wan(experts: int = 1) -> WanPipeline:
    words = tokenizer()
    networks = [components.wan().build(seed=seed) for seed in range(experts)]
    return quiet(
        WanPipeline(
            tokenizer=words,
            text_encoder=t5(words, umt5=True),
            vae=own(components.wan_vae),
            scheduler=components.UNIPC.build(),
            transformer=networks[0],
            transformer_2=networks[1] if experts == 2 else None,
            boundary_ratio=0.7 if experts == 2 else None,
        )
    )


def cogvideox() -> CogVideoXPipeline:
    words = tokenizer()
    return quiet(
        CogVideoXPipeline(
            tokenizer=words,
            text_encoder=t5(words),
            vae=own(components.cog_vae),
            transformer=components.cogvideox(max_text_seq_length=8).build(),
            scheduler=components.COG_DDIM.build(),
        )
    )


def sd3() -> StableDiffusion3Pipeline:
    words, known = tokenizer(), components.SD3
    # Two encoders of the CLIP kind, side by side.
    wide = {"joint_attention_dim": 2 * DIM, "pooled_projection_dim": 2 * DIM}
    return quiet(
        StableDiffusion3Pipeline(
            transformer=components.part(known.name, **known.config | wide).build(),
            scheduler=components.flow().build(),
            vae=own(components.image_vae),
            text_encoder=clip(words, kind=CLIPTextModelWithProjection),
            tokenizer=words,
            text_encoder_2=clip(words, kind=CLIPTextModelWithProjection),
            tokenizer_2=words,
            text_encoder_3=t5(words, dim=2 * DIM),
            tokenizer_3=words,
        )
    )


def own(autoencoder: Callable[[], nn.Module]) -> nn.Module:
    """A copy: pipelines are offloaded and converted here, and one autoencoder is built for all."""
    return copy.deepcopy(autoencoder())


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: k for k, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=8,
    )


def clip(words: PreTrainedTokenizerFast, *, kind: type = CLIPTextModel) -> nn.Module:
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=DIM,
        intermediate_size=DIM,
        projection_dim=DIM,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return awaken(kind(config))


def t5(words: PreTrainedTokenizerFast, *, dim: int = DIM, umt5: bool = False) -> nn.Module:
    config_class, model_class = (
        (UMT5Config, UMT5EncoderModel) if umt5 else (T5Config, T5EncoderModel)
    )
    config = config_class(
        vocab_size=len(words),
        d_model=dim,
        d_kv=8,
        d_ff=dim,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        dropout_rate=0.0,
    )
    return awaken(model_class(config))


_VIDEO = {"height": 32, "width": 32, "num_frames": 9}
CASES = {
    "flux": Case(flux, {"height": 32, "width": 32, "guidance_scale": 3.5}),
    "wan": Case(wan, _VIDEO | {"guidance_scale": 5.0, "negative_prompt": "black"}),
    "wan-experts": Case(lambda: wan(2), _VIDEO | {"guidance_scale": 5.0, "guidance_scale_2": 3.0}),
    "cogvideox": Case(cogvideox, _VIDEO | {"guidance_scale": 6.0}),
    "sd3": Case(sd3, {"height": 32, "width": 32, "guidance_scale": 5.0}),
}
