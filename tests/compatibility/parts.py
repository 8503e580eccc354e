"""What several rows share: prompts and pictures that are noise, schedulers, autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.compatibility.rows import Part, part


class Guard(nn.Module):
    """A safety checker that is asked nothing: no prompt is given, nothing is decoded."""

    device = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.int64)


def flow(**config: Any) -> Part:
    return part("FlowMatchEulerDiscreteScheduler", **({"shift": 3.0} | config))


def unipc() -> Part:
    return part(
        "UniPCMultistepScheduler",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )


def ddim(**config: Any) -> Part:
    return part("DDIMScheduler", **({"clip_sample": False} | config))


DPM = part("DPMSolverMultistepScheduler")
DPM_FLOW = part(
    "DPMSolverMultistepScheduler",
    prediction_type="flow_prediction",
    use_flow_sigmas=True,
    flow_shift=3.0,
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


TINY = {"height": 16, "width": 16}  # for autoencoders that make a latent half as large
SMALL = {"height": 32, "width": 32}  # an eighth
LARGE = {"height": 128, "width": 128}  # a thirty-second part
VIDEO = SMALL | {"num_frames": 9}
PICTURE = {"image": noise(1, 3, 16, 16).tanh()}
HALF = noise(1, 1, 16, 16).sign().clamp_min(0)
FRAME = {"image": noise(1, 3, 32, 32).tanh()}

TEXT = {"prompt_embeds": noise(1, 4, 16)}
GUIDED = TEXT | {"negative_prompt_embeds": noise(1, 4, 16, seed=1)}
MASKED = GUIDED | {
    "prompt_attention_mask": mask(1, 4),
    "negative_prompt_attention_mask": mask(1, 4),
}
BOTH_MASKS = {"prompt_embeds_mask": mask(1, 4), "negative_prompt_embeds_mask": mask(1, 4)}
POOLED = GUIDED | {
    "pooled_prompt_embeds": noise(1, 16),
    "negative_pooled_prompt_embeds": noise(1, 16, seed=1),
}
TWO_ENCODERS = (
    GUIDED
    | BOTH_MASKS
    | {
        "prompt_embeds_2": noise(1, 4, 16, seed=2),
        "prompt_embeds_mask_2": mask(1, 4),
        "negative_prompt_embeds_2": noise(1, 4, 16, seed=3),
        "negative_prompt_embeds_mask_2": mask(1, 4),
    }
)
KANDINSKY_TEXT = {
    "prompt_embeds_qwen": noise(1, 4, 16),
    "prompt_embeds_clip": noise(1, 16),
    "prompt_cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
    "negative_prompt_embeds_qwen": noise(1, 4, 16, seed=1),
    "negative_prompt_embeds_clip": noise(1, 16, seed=1),
    "negative_prompt_cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
}
