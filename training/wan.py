"""The parts of `emoji-wan`: text encoder, transformer, scheduler, and how they are called.

The calls here are those of `WanPipeline`, without its bookkeeping, so that training sees exactly
what the pipeline will compute. Knows nothing of the data or of the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn

from training.data import all_words
from training.objectives import Flow
from training.parts import CompiledParts
from training.text import t5_tokenizer, tokenize, umt5_encoder

__all__ = ["WanParts"]

_WIDTH = 128
_TOKENS = 16  # text tokens


class WanParts(CompiledParts):
    """Everything of a `WanPipeline` but the autoencoder."""

    space = "video"
    objective = Flow(shift=3.0, scale=1000.0)

    def __init__(self) -> None:
        """Build untrained modules from the global seed."""
        self.tokenizer = t5_tokenizer(all_words(), length=_TOKENS)
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=_WIDTH // 32,
            attention_head_dim=32,
            in_channels=16,
            out_channels=16,
            text_dim=_WIDTH,
            freq_dim=64,
            ffn_dim=3 * _WIDTH,
            num_layers=10,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )
        encoder = umt5_encoder(self.tokenizer, width=_WIDTH)
        self.modules = nn.ModuleDict({"transformer": transformer, "text_encoder": encoder})

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, ...]:
        """Token ids and their mask, padded as the pipeline pads them."""
        tokens = tokenize(self.tokenizer, captions)
        return tokens.input_ids, tokens.attention_mask

    def predict(self, latents: Tensor, level: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
        """Predict noise minus data.

        Args:
            latents: Noisy latents, shape (batch, 16, 5, 8, 8).
            level: Noise level in [0, 1000], shape (batch,).
            ids: Token ids and mask from `tokenize`.
        """
        tokens, mask = ids
        text = self.modules["text_encoder"](tokens, mask).last_hidden_state
        return self.transformer(
            hidden_states=latents,
            timestep=level,
            encoder_hidden_states=text * mask[:, :, None],  # the pipeline pads with zeros
            return_dict=False,
        )[0]

    def pipeline(self, vae: AutoencoderKLWan) -> WanPipeline:
        """The complete pipeline around a trained autoencoder."""
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=self.objective.shift,
            solver_order=2,
            timestep_spacing="linspace",
            final_sigmas_type="zero",
        )
        return WanPipeline(tokenizer=self.tokenizer, vae=vae, scheduler=scheduler, **self.modules)
