"""Tiny components of pipelines: networks, schedulers and autoencoders, each built in one place.

A ``Part`` is the class of a component and its configuration; `build` gives it random weights from a
seed. Functions with keyword arguments return a variant of a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import torch
from torch import nn


@dataclass(frozen=True)
class Part:
    """A class of diffusers and the configuration of one instance."""

    name: str
    config: Mapping[str, Any]

    def build(self, *, seed: int = 0) -> Any:
        component = getattr(diffusers, self.name)(**self.config)
        return awaken(component, seed=seed) if isinstance(component, nn.Module) else component


def part(name: str, **config: Any) -> Part:
    return Part(name, config)


def awaken(network: nn.Module, *, seed: int = 0) -> nn.Module:
    """Random weights everywhere: layers initialised with zeros would make every output zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.eval()


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


# Schedulers


def flow(**changes: Any) -> Part:
    return part("FlowMatchEulerDiscreteScheduler", **({"shift": 3.0} | changes))


def ddim(**changes: Any) -> Part:
    return part("DDIMScheduler", **({"clip_sample": False} | changes))


_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
_COG_NOISE = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}
UNIPC = part("UniPCMultistepScheduler", **_FLOW)
DPM = part("DPMSolverMultistepScheduler")
DPM_FLOW = part("DPMSolverMultistepScheduler", **_FLOW)
COG_DDIM = part("CogVideoXDDIMScheduler", **_COG_NOISE)
COG_DPM = part("CogVideoXDPMScheduler", **_COG_NOISE)


# Networks of several pipelines

FLUX_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (2, 2, 4),
}
WAN_CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 16,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}
_COG_CONFIG: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 1,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 9,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 4,
}


def flux(**changes: Any) -> Part:
    config = FLUX_CONFIG | {"pooled_projection_dim": 16, "guidance_embeds": True}
    return part("FluxTransformer2DModel", **config | changes)


def wan(**changes: Any) -> Part:
    return part("WanTransformer3DModel", **WAN_CONFIG | changes)


def cogvideox(**changes: Any) -> Part:
    return part("CogVideoXTransformer3DModel", **_COG_CONFIG | changes)


def cosmos(channels: int) -> Part:
    return part(
        "CosmosTransformer3DModel",
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,
    )


SD3 = part(
    "SD3Transformer2DModel",
    sample_size=16,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    caption_projection_dim=16,
    joint_attention_dim=16,
    pooled_projection_dim=16,
    pos_embed_max_size=16,
)
QWEN = part(
    "QwenImageTransformer2DModel",
    patch_size=2,
    in_channels=16,
    out_channels=4,
    num_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=16,
    axes_dims_rope=(8, 4, 4),
)
LTX = part(
    "LTXVideoTransformer3DModel",
    in_channels=8,
    out_channels=8,
    patch_size=1,
    patch_size_t=1,
    num_attention_heads=2,
    attention_head_dim=8,
    cross_attention_dim=16,
    num_layers=1,
    caption_channels=16,
)
KANDINSKY = part(
    "Kandinsky5Transformer3DModel",
    in_visual_dim=16,
    in_text_dim=16,
    in_text_dim2=16,
    time_dim=16,
    out_visual_dim=16,
    patch_size=(1, 2, 2),
    model_dim=16,
    ff_dim=16,
    num_text_blocks=1,
    num_visual_blocks=1,
    axes_dims=(1, 1, 2),
    visual_cond=False,
    attention_type="regular",
)


# Autoencoders; one instance of each, since no pipeline changes it


@cache
def image_vae() -> Any:
    return _settled(
        lambda: diffusers.AutoencoderKL(
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


@cache
def wan_vae() -> Any:
    return _settled(
        lambda: diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1)
    )


@cache
def cog_vae() -> Any:
    return _settled(
        lambda: diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        )
    )


def _settled(build: Callable[[], nn.Module]) -> nn.Module:
    """A module with the usual initial weights, the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


class Guard(nn.Module):
    """A safety checker that is never called: there is no prompt and nothing is decoded."""

    device = torch.device("cpu")
