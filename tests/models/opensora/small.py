"""Small networks with seeded weights, and the outputs of the public implementation for them.

The golden files were written by the public v1.2 implementation (float32, CPU) with these weights:
inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ertacache.models.opensora import (
    AutoencoderKLOpenSora,
    OpenSoraPipeline,
    OpenSoraTransformer3DModel,
    RFlowScheduler,
)
from tests.integration.tiny import quiet, t5, tokenizer

GOLDEN = Path(__file__).parent / "golden"
KEPT = {"rope.freqs", "scale", "shift"}  # set by the configuration

TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "caption_channels": 24,
    "max_sequence_length": 9,
    "base_resolution": 64,
}
AUTOENCODER = {
    "spatial_block_out_channels": (4, 8, 8, 8),
    "spatial_layers_per_block": 1,
    "spatial_norm_num_groups": 2,
    "temporal_block_out_channels": (8, 16, 16, 32),
    "temporal_layers_per_block": 1,
    "temporal_norm_num_groups": 4,
}


def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def seeded_state(shapes: Mapping[str, torch.Size], *, seed: int) -> dict[str, Tensor]:
    """Weights from a seed: one draw per key, in alphabetical order."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key in sorted(shapes):
        noise = torch.randn(shapes[key], generator=generator)
        if noise.ndim > 1:
            state[key] = noise * noise[0].numel() ** -0.5
        else:
            state[key] = 0.1 * noise + (1.0 if key.endswith("weight") else 0.0)
    return state


def give_weights(network: Any, *, seed: int) -> Any:
    module: nn.Module = network
    shapes = {key: value.shape for key, value in module.state_dict().items() if key not in KEPT}
    missing, unexpected = module.load_state_dict(seeded_state(shapes, seed=seed), strict=False)
    assert set(missing) <= KEPT
    assert not unexpected
    return module.eval()


def transformer(**changes: Any) -> OpenSoraTransformer3DModel:
    return give_weights(OpenSoraTransformer3DModel(**(TRANSFORMER | changes)), seed=1)


def autoencoder() -> AutoencoderKLOpenSora:
    return give_weights(AutoencoderKLOpenSora(**AUTOENCODER), seed=2)


def pipeline() -> OpenSoraPipeline:
    words = tokenizer()
    return quiet(
        OpenSoraPipeline(
            tokenizer=words,
            text_encoder=t5(words, dim=TRANSFORMER["caption_channels"]),
            vae=autoencoder(),
            transformer=transformer(),
            scheduler=RFlowScheduler(),
        )
    )
