"""The autoencoder of Open-Sora 1.2: a spatial one per frame, then a temporal one.

Time is split into micro frames that are compressed independently. The keys and shapes of its
``state_dict`` are those of the published weights.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from ertacache.models.opensora.original import load_original, vae_config
from ertacache.models.opensora.temporal_vae import TemporalVAE

__all__ = ["AutoencoderKLOpenSora"]


class SpatialVAE(nn.Module):
    """An image autoencoder applied to the frames of a video, a few at a time."""

    def __init__(self, module: AutoencoderKL, *, scaling_factor: float, batch_size: int) -> None:
        """Wrap ``module``; its latents are multiplied by ``scaling_factor``."""
        super().__init__()
        self.module = module
        self._scaling_factor, self._batch_size = scaling_factor, batch_size

    def encode(self, video: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode each frame: a sample if a generator is given, the mean otherwise."""

        def encode(frames: Tensor) -> Tensor:
            posterior = self.module.encode(frames).latent_dist
            z: Tensor = posterior.mode() if generator is None else posterior.sample(generator)
            return z * self._scaling_factor

        return self._by_frame(encode, video)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode each frame."""
        return self._by_frame(
            lambda frames: self.module.decode(frames / self._scaling_factor).sample, latents
        )

    def _by_frame(self, function: Any, x: Tensor) -> Tensor:
        batch = len(x)
        frames = x.transpose(1, 2).flatten(0, 1)
        done = torch.cat([function(part) for part in torch.split(frames, self._batch_size)])
        return done.reshape(batch, -1, *done.shape[1:]).transpose(1, 2)


class AutoencoderKLOpenSora(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Videos to latents and back: 8 times smaller in space, about 4 times shorter in time.

    Latents are normalised: mean near 0, standard deviation near 1.

    Args:
        latent_channels: channels of the latents, of either autoencoder.
        spatial_block_out_channels: channels of the spatial autoencoder's levels; each level but the
            last halves the size.
        spatial_layers_per_block: residual layers per spatial level.
        spatial_norm_num_groups: groups of the spatial normalisations.
        spatial_scaling_factor: factor of the spatial latents.
        temporal_block_out_channels: channels of the temporal autoencoder's levels.
        temporal_downsample: whether the frames are halved after each level but the last.
        temporal_layers_per_block: residual layers per temporal level.
        temporal_norm_num_groups: groups of the temporal normalisations.
        micro_frame_size: frames that are compressed together.
        micro_batch_size: frames per batch of the spatial autoencoder.
        latents_mean: mean of each channel, subtracted on encoding.
        latents_std: standard deviation of each channel, divided by on encoding.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        latent_channels: int = 4,
        spatial_block_out_channels: tuple[int, ...] = (128, 256, 512, 512),
        spatial_layers_per_block: int = 2,
        spatial_norm_num_groups: int = 32,
        spatial_scaling_factor: float = 0.18215,
        temporal_block_out_channels: tuple[int, ...] = (128, 256, 256, 512),
        temporal_downsample: tuple[bool, ...] = (False, True, True),
        temporal_layers_per_block: int = 4,
        temporal_norm_num_groups: int = 32,
        micro_frame_size: int = 17,
        micro_batch_size: int = 4,
        latents_mean: tuple[float, ...] = (-0.10, 0.34, 0.27, 0.98),
        latents_std: tuple[float, ...] = (3.85, 2.32, 2.33, 3.06),
    ) -> None:
        """Initialise both autoencoders with fresh weights."""
        super().__init__()  # type: ignore[no-untyped-call]
        levels = len(spatial_block_out_channels)
        images = AutoencoderKL(
            block_out_channels=tuple(spatial_block_out_channels),
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=spatial_layers_per_block,
            latent_channels=latent_channels,
            norm_num_groups=spatial_norm_num_groups,
        )
        self.spatial_vae = SpatialVAE(
            images, scaling_factor=spatial_scaling_factor, batch_size=micro_batch_size
        )
        self.temporal_vae = TemporalVAE(
            latent_channels,
            widths=temporal_block_out_channels,
            halve=temporal_downsample,
            layers=temporal_layers_per_block,
            groups=temporal_norm_num_groups,
        )
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", torch.tensor(latents_std).view(1, -1, 1, 1, 1))
        self.register_buffer("shift", torch.tensor(latents_mean).view(1, -1, 1, 1, 1))

    @classmethod
    def from_original(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, **config: Any
    ) -> AutoencoderKLOpenSora:
        """Load the published weights.

        Args:
            source: the ``.safetensors`` file, a folder that holds it, with or without its
                ``config.json``, or the hub id ``hpcai-tech/OpenSora-VAE-v1.2``.
            dtype: precision of the weights.
            config: overrides of the ``config.json``, by the argument names of this class.
        """
        return load_original(cls, source, read_config=vae_config, changes=config, dtype=dtype)

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels per latent row or column."""
        return int(2 ** (len(self.config["spatial_block_out_channels"]) - 1))

    def latent_frames(self, num_frames: int) -> int:
        """Number of latent frames of a video.

        Example:
            >>> tiny = AutoencoderKLOpenSora(4, (8, 8), 1, 4, 1.0, (8, 8, 8), (True, True), 1, 4)
            >>> [tiny.latent_frames(num_frames) for num_frames in (1, 17, 51, 20)]
            [1, 5, 15, 6]
        """
        micro: int = self.config["micro_frame_size"]
        whole, rest = divmod(num_frames, micro)
        count = self.temporal_vae.latent_frames
        return whole * count(micro) + count(rest)

    def encode(
        self, x: Tensor, return_dict: bool = True, *, generator: torch.Generator | None = None
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode videos.

        Args:
            x: shape (batch, 3, frames, height, width), in [-1, 1].
            return_dict: whether to return the output class rather than a tuple.
            generator: samples the spatial latents, as the published code does; without it their
                means are used.

        Returns:
            The distribution of the normalised latents.
        """
        spatial = self.spatial_vae.encode(x, generator)
        parts = torch.split(spatial, self.config["micro_frame_size"], dim=2)
        moments = torch.cat([self.temporal_vae.encode(part) for part in parts], dim=2)
        mean, logvar = moments.chunk(2, dim=1)
        scale, shift = self.scale.to(mean), self.shift.to(mean)
        normal = torch.cat([(mean - shift) / scale, logvar - 2 * scale.log()], dim=1)
        posterior = DiagonalGaussianDistribution(normal)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(
        self, z: Tensor, return_dict: bool = True, *, num_frames: int | None = None
    ) -> DecoderOutput | tuple[Tensor]:
        """Decode latents.

        Args:
            z: normalised latents, shape (batch, channels, frames, height, width).
            return_dict: whether to return the output class rather than a tuple.
            num_frames: frames of the video; if not given, the most that fit the latents.

        Returns:
            The videos, shape (batch, 3, frames, height, width), about in [-1, 1].
        """
        micro = self.config["micro_frame_size"]
        step = self.latent_frames(micro)
        if num_frames is None:
            whole, rest = divmod(z.shape[2], step)
            num_frames = whole * micro + rest * self.temporal_vae.compression
        if self.latent_frames(num_frames) != z.shape[2]:
            raise ValueError(
                f"{num_frames} frames have {self.latent_frames(num_frames)} latent frames, "
                f"but there are {z.shape[2]}"
            )
        z = z * self.scale.to(z) + self.shift.to(z)
        parts = [
            self.temporal_vae.decode(part, num_frames=min(micro, num_frames - k * micro))
            for k, part in enumerate(torch.split(z, step, dim=2))
        ]
        video = self.spatial_vae.decode(torch.cat(parts, dim=2))
        return DecoderOutput(sample=video) if return_dict else (video,)

    def forward(self, sample: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode, using the means of the latents."""
        z = self.encode(sample, return_dict=False)[0].mode()
        return self.decode(z, return_dict, num_frames=sample.shape[2])
