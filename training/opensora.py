"""The parts of `emoji-opensora`: text encoder, transformer, scheduler, and how they are called.

The calls here are those of `OpenSoraPipeline`, without its bookkeeping, so that training sees
exactly what the pipeline will compute. Knows nothing of the data or of the training loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.models.opensora import (
    AutoencoderKLOpenSora,
    OpenSoraPipeline,
    OpenSoraTransformer3DModel,
    RFlowScheduler,
)
from ertacache.models.opensora.scheduler import size_ratio
from training.data import all_words
from training.objectives import Flow
from training.parts import CompiledParts
from training.text import t5_encoder, t5_tokenizer, tokenize

__all__ = ["OpenSoraParts", "look_around"]

_WIDTH = 128
_TOKENS = 16  # text tokens
_SIDE, _FRAMES = 32, 17  # of the videos; positions and noise levels are scaled to this size
# Which frame each head of the temporal attention looks at to begin with, relative to its own, and
# the frequency that tells it from others: the one before, the one behind, the first, the last.
_LOOKS = ((-1, 0), (1, 0), (-4, 2), (4, 2))
_FIRM = 8.0  # length of the constant part of queries and keys, beside contents of about 4
_FPS = inspect.signature(OpenSoraPipeline.__call__).parameters["fps"].default


@torch.no_grad()
def look_around(transformer: OpenSoraTransformer3DModel) -> None:
    """Begin with heads that look at certain frames: the network has no other sense of time.

    Its rotary positions are relative, and attention is an average: frames of equal content cannot
    be distinguished. Left to find that out alone, motions were learnt much later than subjects.
    """
    frequencies: Tensor = transformer.rope.freqs
    for block in transformer.temporal_blocks:
        attention: Any = block.attn
        query, key, _ = attention.qkv.bias.view(3, attention.heads, -1)
        for head, (frame, pair) in enumerate(_LOOKS):
            angle = -frame * frequencies[pair]
            query[head, 2 * pair] = _FIRM
            key[head, 2 * pair], key[head, 2 * pair + 1] = _FIRM * angle.cos(), _FIRM * angle.sin()


class OpenSoraParts(CompiledParts):
    """Everything of an `OpenSoraPipeline` but the autoencoder."""

    space = "video"
    objective = Flow(
        shift=size_ratio(_SIDE, _SIDE, _FRAMES, base_resolution=_SIDE), scale=1000.0, sign=-1.0
    )

    def __init__(self) -> None:
        """Build untrained modules from the global seed."""
        self.tokenizer = t5_tokenizer(all_words(), length=_TOKENS)
        transformer = OpenSoraTransformer3DModel(
            num_attention_heads=_WIDTH // 32,
            attention_head_dim=32,
            num_layers=5,
            patch_size=(2, 1, 2),  # the last in time is half empty: an absolute sense of time
            in_channels=16,
            out_channels=16,  # no variance: the sampler would not look at it
            mlp_ratio=3.0,
            caption_channels=_WIDTH,
            max_sequence_length=_TOKENS,
            base_resolution=_SIDE,
        )
        look_around(transformer)
        encoder = t5_encoder(self.tokenizer, width=_WIDTH)
        self.modules = nn.ModuleDict({"transformer": transformer, "text_encoder": encoder})

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, ...]:
        """Token ids and their mask; the pipeline pads less, but both networks see the mask."""
        tokens = tokenize(self.tokenizer, captions)
        return tokens.input_ids, tokens.attention_mask

    def drop(
        self, dropped: Tensor, ids: tuple[Tensor, ...], empty: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Hide captions but not their length: the network's empty text is as long as the prompt."""
        tokens, mask = ids
        return torch.where(dropped[:, None], self.tokenizer.pad_token_id, tokens), mask

    def predict(self, latents: Tensor, level: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
        """Predict data minus noise.

        Args:
            latents: Noisy latents, shape (batch, 16, 5, 8, 8).
            level: Noise level in [0, 1000], shape (batch,).
            ids: Token ids and mask from `tokenize`; nothing but padding is no text.
        """
        tokens, mask = ids
        text = self.modules["text_encoder"](tokens, attention_mask=mask).last_hidden_state
        written = (tokens != self.tokenizer.pad_token_id).any(dim=1)
        empty = self.modules["transformer"].null_text(_TOKENS)
        return self.transformer(
            hidden_states=latents,
            timestep=level,
            encoder_hidden_states=torch.where(written[:, None, None], text, empty),
            encoder_attention_mask=mask,
            fps=_FPS,
            height=_SIDE,
            width=_SIDE,
            return_dict=False,
        )[0]

    def pipeline(self, vae: AutoencoderKLOpenSora) -> OpenSoraPipeline:
        """The complete pipeline around a trained autoencoder."""
        scheduler = RFlowScheduler(base_resolution=_SIDE)
        return OpenSoraPipeline(
            tokenizer=self.tokenizer, vae=vae, scheduler=scheduler, **self.modules
        )
