"""The parts of `emoji-flux`: text encoders, transformer, scheduler, and how they are called.

The calls here are those of `FluxPipeline`, without its bookkeeping, so that training sees exactly
what the pipeline will compute. Knows nothing of the data or of the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor, nn

from training.data import all_words
from training.objectives import Flow
from training.parts import CompiledParts
from training.text import clip_encoder, clip_tokenizer, t5_encoder, t5_tokenizer, tokenize

__all__ = ["FluxParts", "pack", "unpack"]

_WIDTH = 128  # of the text encoders
_HEADS = 4  # of 32 channels each: the transformer is 128 wide
_TOKENS = 16  # text tokens of either encoder
_GRID = 8  # packed latents per side
_CHANNELS = 20  # channels of the latent before packing


def pack(latents: Tensor) -> Tensor:
    """Fold 2 x 2 latents into one token: (batch, c, 2h, 2w) to (batch, h w, 4c)."""
    return nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpack(tokens: Tensor) -> Tensor:
    """The inverse of `pack` for a square canvas."""
    side = int(tokens.shape[1] ** 0.5)
    return nn.functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (side, side)), 2)


class FluxParts(CompiledParts):
    """Everything of a `FluxPipeline` but the autoencoder."""

    space = "image"
    objective = Flow(shift=3.0)

    def __init__(self) -> None:
        """Build untrained modules from the global seed."""
        words = all_words()
        self.clip_tokenizer = clip_tokenizer(words, length=_TOKENS)
        self.t5_tokenizer = t5_tokenizer(words, length=_TOKENS)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * _CHANNELS,
            num_layers=3,
            num_single_layers=6,
            attention_head_dim=32,
            num_attention_heads=_HEADS,
            joint_attention_dim=_WIDTH,
            pooled_projection_dim=_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        self.modules = nn.ModuleDict(
            {
                "transformer": transformer,
                "text_encoder": clip_encoder(self.clip_tokenizer, width=_WIDTH),
                "text_encoder_2": t5_encoder(self.t5_tokenizer, width=_WIDTH),
            }
        )
        ids = torch.cartesian_prod(torch.arange(_GRID), torch.arange(_GRID))
        self.image_ids = nn.functional.pad(ids.float(), (1, 0))
        self.text_ids = torch.zeros(_TOKENS, 3)

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, ...]:
        """Token ids of both encoders, padded as the pipeline pads them."""
        tokenizers = (self.clip_tokenizer, self.t5_tokenizer)
        return tuple(tokenize(tokenizer, captions).input_ids for tokenizer in tokenizers)

    def predict(self, latents: Tensor, level: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
        """Predict noise minus data.

        Args:
            latents: Noisy latents, shape (batch, 20, 16, 16).
            level: Noise level in [0, 1], shape (batch,).
            ids: Token ids from `tokenize`, each of shape (batch, 16).
        """
        pooled = self.modules["text_encoder"](ids[0]).pooler_output
        text = self.modules["text_encoder_2"](ids[1]).last_hidden_state
        tokens = self.transformer(
            hidden_states=pack(latents),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=level,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )[0]
        return unpack(tokens)

    def pipeline(self, vae: AutoencoderKL) -> FluxPipeline:
        """The complete pipeline around a trained autoencoder."""
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self.objective.shift),
            vae=vae,
            tokenizer=self.clip_tokenizer,
            tokenizer_2=self.t5_tokenizer,
            **self.modules,
        )
