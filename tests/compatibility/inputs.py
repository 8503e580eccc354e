"""Inputs of the tiny pipelines: sizes, images and prompt embeddings, all of them noise."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.int64)


TINY = {"height": 16, "width": 16}  # for autoencoders with a compression of 2
SMALL = {"height": 32, "width": 32}  # of 8
LARGE = {"height": 128, "width": 128}  # of 32
VIDEO = SMALL | {"num_frames": 9}
IMAGE = {"image": noise(1, 3, 16, 16).tanh()}
HALF = noise(1, 1, 16, 16).sign().clamp_min(0)
FRAME = {"image": noise(1, 3, 32, 32).tanh()}
CLIP = TINY | {"num_frames": 5}  # where an autoencoder encodes a video

TEXT = {"prompt_embeds": noise(1, 4, 16)}
GUIDED = TEXT | {"negative_prompt_embeds": noise(1, 4, 16, seed=1)}
MASKS = {"prompt_attention_mask": mask(1, 4), "negative_prompt_attention_mask": mask(1, 4)}
MASKED = GUIDED | MASKS
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
