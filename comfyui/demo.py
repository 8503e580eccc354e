"""The bundled emoji-flux as ComfyUI objects: MODEL, CLIP and VAE.

For demonstrations and tests: a real model of Flux's architecture that is small enough for a CPU.
The network is ComfyUI's own Flux; text encoders and autoencoder are those of diffusers, because
ComfyUI's have fixed sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ertacache.models import MODELS, load_pipeline

__all__ = ["DemoText", "DemoVAE", "load_demo"]

NAME = "emoji-flux"


class EmojiLatents(comfy.latent_formats.LatentFormat):
    """Latents of the bundled autoencoder: a fourth of the image's size."""

    spacial_downscale_ratio = 4

    def __init__(self, vae: Any) -> None:
        """Find how previews are made of latents: colours that come nearest to the decoder's."""
        self.latent_channels = vae.config.latent_channels
        noise = torch.Generator().manual_seed(0)
        latents = torch.randn(16, self.latent_channels, 8, 8, generator=noise)
        with torch.no_grad():
            images = avg_pool2d(vae.decode(latents).sample, self.spacial_downscale_ratio)
        columns = [part.movedim(1, -1).flatten(0, 2) for part in (latents, images)]
        inputs = torch.cat([columns[0], torch.ones(len(columns[0]), 1)], dim=1)
        factors = torch.linalg.lstsq(inputs, columns[1]).solution.tolist()
        self.latent_rgb_factors, self.latent_rgb_factors_bias = factors[:-1], factors[-1]


class DemoText:
    """What CLIPTextEncode needs of a CLIP: tokens of a prompt, and conditioning of tokens."""

    def __init__(self, pipe: Any) -> None:
        """Keep the pipeline, whose ``encode_prompt`` does the work."""
        self._pipe = pipe

    def tokenize(self, text: str, **options: Any) -> dict[str, list[str]]:
        """The prompt itself: the pipeline tokenizes it."""
        return {"prompts": [text]}

    def encode_from_tokens_scheduled(
        self, tokens: dict[str, list[str]], **options: Any
    ) -> list[Any]:
        """ComfyUI conditioning: hidden states of T5, and the pooled output of CLIP."""
        length = MODELS[NAME].extra["max_sequence_length"]
        with torch.no_grad():
            hidden, pooled, _ = self._pipe.encode_prompt(
                tokens["prompts"], None, max_sequence_length=length
            )
        return [[hidden, {"pooled_output": pooled}]]


class DemoVAE:
    """What VAEDecode and VAEEncode need of a VAE. Images are (B, H, W, 3), from 0 to 1."""

    def __init__(self, vae: Any) -> None:
        """Keep the autoencoder of diffusers."""
        self._vae = vae

    def decode(self, latents: Tensor) -> Tensor:
        """Images of latents."""
        with torch.no_grad():
            images: Tensor = self._vae.decode(latents.to("cpu", torch.float32)).sample
        return (images / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    def encode(self, images: Tensor) -> Tensor:
        """Latents of images: the mean of their distribution."""
        with torch.no_grad():
            batch = images[..., :3].movedim(-1, 1).to("cpu", torch.float32)
            latents: Tensor = self._vae.encode(batch * 2 - 1).latent_dist.mode()
        return latents


def load_demo() -> tuple[Any, DemoText, DemoVAE]:
    """Load the bundled model."""
    pipe = load_pipeline(NAME)
    latents = EmojiLatents(pipe.vae)
    return load_network(MODELS[NAME].folder, latents), DemoText(pipe), DemoVAE(pipe.vae)


def load_network(folder: Path, latents: EmojiLatents) -> Any:
    """ComfyUI's Flux network with the weights of a diffusers folder, as a MODEL."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    weights = comfy.utils.load_torch_file(
        str(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    )
    model_config = comfy.supported_models.FluxSchnell(_network_config(config))
    model_config.latent_format = latents
    model_config.sampling_settings["shift"] = scheduler["shift"]
    model_config.set_inference_dtype(torch.float32, None)
    model = model_config.get_model({}, "")
    model.load_model_weights(comfy.model_detection.convert_diffusers_mmdit(weights), "")
    return comfy.model_patcher.CoreModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def _network_config(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ComfyUI's Flux that belong to a configuration of diffusers."""
    patch = 2  # diffusers packs 2 x 2 latent pixels into the channels of a token
    channels = config["in_channels"] // patch**2
    return {
        "image_model": "flux",
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "vec_in_dim": config["pooled_projection_dim"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "mlp_ratio": 4.0,
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": config["guidance_embeds"],
        "txt_ids_dims": [],
    }
