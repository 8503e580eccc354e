"""The parts of `emoji-cogvideox`: text encoder, transformer, scheduler, and how they are called.

The calls here are those of `CogVideoXPipeline`, without its bookkeeping, so that training sees
exactly what the pipeline will compute. Knows nothing of the data or of the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from torch import Tensor, nn

from training.data import all_words
from training.objectives import VPrediction
from training.parts import CompiledParts
from training.text import t5_encoder, t5_tokenizer, tokenize

__all__ = ["CogVideoXParts"]

_WIDTH = 128
_TOKENS = 16  # text tokens


class CogVideoXParts(CompiledParts):
    """Everything of a `CogVideoXPipeline` but the autoencoder."""

    space = "video"

    def __init__(self) -> None:
        """Build untrained modules from the global seed."""
        self.tokenizer = t5_tokenizer(all_words(), length=_TOKENS)
        self.scheduler = CogVideoXDDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            snr_shift_scale=1.0,
            clip_sample=False,
        )
        self.objective = VPrediction(self.scheduler)
        transformer = CogVideoXTransformer3DModel(
            num_attention_heads=_WIDTH // 32,
            attention_head_dim=32,
            in_channels=16,
            out_channels=16,
            time_embed_dim=_WIDTH,
            text_embed_dim=_WIDTH,
            num_layers=8,
            sample_width=8,
            sample_height=8,
            sample_frames=17,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=_TOKENS,
        )
        encoder = t5_encoder(self.tokenizer, width=_WIDTH)
        self.modules = nn.ModuleDict({"transformer": transformer, "text_encoder": encoder})

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, ...]:
        """Token ids, padded as the pipeline pads them."""
        tokens = tokenize(self.tokenizer, captions)
        return (tokens.input_ids,)

    def predict(self, latents: Tensor, level: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
        """Predict the velocity.

        Args:
            latents: Noisy latents, shape (batch, 16, 5, 8, 8).
            level: Timestep in 0 to 999, shape (batch,).
            ids: Token ids from `tokenize`.
        """
        text = self.modules["text_encoder"](ids[0]).last_hidden_state
        frames_first = self.transformer(
            hidden_states=latents.transpose(1, 2),
            encoder_hidden_states=text,
            timestep=level,
            return_dict=False,
        )[0]
        return frames_first.transpose(1, 2)

    def pipeline(self, vae: AutoencoderKLCogVideoX) -> CogVideoXPipeline:
        """The complete pipeline around a trained autoencoder."""
        return CogVideoXPipeline(
            tokenizer=self.tokenizer, vae=vae, scheduler=self.scheduler, **self.modules
        )
