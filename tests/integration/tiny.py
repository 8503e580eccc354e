"""Complete diffusers pipelines of random weights, small enough to build and run in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
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
    network = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=DIM,
        pooled_projection_dim=DIM,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    return quiet(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=clip(words),
            tokenizer=words,
            text_encoder_2=t5(words),
            tokenizer_2=words,
            vae=image_vae(),
            transformer=awaken(network),
        )
    )


def wan(experts: int = 1) -> WanPipeline:
    words = tokenizer()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    networks = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=DIM,
            freq_dim=16,
            ffn_dim=16,
            num_layers=1,
            rope_max_seq_len=32,
        )
        for _ in range(experts)
    ]
    awake = [awaken(network, seed=seed) for seed, network in enumerate(networks)]
    return quiet(
        WanPipeline(
            tokenizer=words,
            text_encoder=t5(words, umt5=True),
            vae=wan_vae(),
            scheduler=scheduler,
            transformer=awake[0],
            transformer_2=awake[1] if experts == 2 else None,
            boundary_ratio=0.7 if experts == 2 else None,
        )
    )


def cogvideox() -> CogVideoXPipeline:
    words = tokenizer()
    network = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=DIM,
        num_layers=1,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
    )
    return quiet(
        CogVideoXPipeline(
            tokenizer=words,
            text_encoder=t5(words),
            vae=cog_vae(),
            transformer=awaken(network),
            scheduler=scheduler,
        )
    )


def sd3() -> StableDiffusion3Pipeline:
    words = tokenizer()
    network = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=2 * DIM,
        pooled_projection_dim=2 * DIM,
        pos_embed_max_size=16,
    )
    return quiet(
        StableDiffusion3Pipeline(
            transformer=awaken(network),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_vae(),
            text_encoder=clip(words, kind=CLIPTextModelWithProjection),
            tokenizer=words,
            text_encoder_2=clip(words, kind=CLIPTextModelWithProjection),
            tokenizer_2=words,
            text_encoder_3=t5(words, dim=2 * DIM),
            tokenizer_3=words,
        )
    )


def settled(build: Callable[[], Any]) -> Any:
    """A module with its usual random weights, the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def awaken(network: nn.Module, *, seed: int = 0) -> nn.Module:
    """Random weights everywhere: layers that start at zero would make every output zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.eval()


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


def image_vae() -> AutoencoderKL:
    return settled(
        lambda: AutoencoderKL(
            block_out_channels=(4, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0,
        )
    )


def wan_vae() -> AutoencoderKLWan:
    return settled(
        lambda: AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1)
    )


def cog_vae() -> AutoencoderKLCogVideoX:
    return settled(
        lambda: AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        )
    )


_VIDEO = {"height": 32, "width": 32, "num_frames": 9}
CASES = {
    "flux": Case(flux, {"height": 32, "width": 32, "guidance_scale": 3.5}),
    "wan": Case(wan, _VIDEO | {"guidance_scale": 5.0, "negative_prompt": "black"}),
    "wan-experts": Case(lambda: wan(2), _VIDEO | {"guidance_scale": 5.0, "guidance_scale_2": 3.0}),
    "cogvideox": Case(cogvideox, _VIDEO | {"guidance_scale": 6.0}),
    "sd3": Case(sd3, {"height": 32, "width": 32, "guidance_scale": 5.0}),
}
