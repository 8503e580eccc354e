"""What enters STDiT3: patches, their places, timesteps, frame rates and the text.

Names of parameters are those of the published weights. Knows nothing of attention.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ertacache.models.opensora.blocks import FeedForward

__all__ = ["CaptionEmbedder", "PatchEmbed", "ScalarEmbedder", "position_embedding"]

_FREQUENCIES = 256


def position_embedding(
    rows: int, columns: int, *, dim: int, scale: float, device: torch.device
) -> Tensor:
    """Sines and cosines of the place of each patch, column first, shape (patches, dim).

    Both axes are stretched to the side of a square with as many patches, and divided by ``scale``,
    the ratio of the picture's size to the one that the network was made for.

    Example:
        >>> position_embedding(1, 2, dim=4, scale=1.0, device=torch.device("cpu"))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.4794, 0.8776, 0.0000, 1.0000]])
    """
    side = round((rows * columns) ** 0.5)
    exponents = torch.arange(0, dim // 2, 2, dtype=torch.float32, device=device) / (dim // 2)
    freqs = 1.0 / 10000**exponents

    def encode(length: int) -> Tensor:
        places = torch.arange(length, device=device) / scale * (side / length)
        angles = torch.outer(places, freqs)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    x = encode(columns).expand(rows, columns, -1)
    y = encode(rows)[:, None].expand(rows, columns, -1)
    return torch.cat([x, y], dim=-1).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Patches of a video as vectors; edges that do not fill a patch are filled up with zeros."""

    def __init__(self, patch_size: tuple[int, int, int], *, in_channels: int, dim: int) -> None:
        """Make ``dim`` channels of patches of so many frames, rows and columns."""
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv3d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, video: Tensor) -> Tensor:
        """Return (batch, channels, frames, rows, columns), counted in patches."""
        missing = [
            -size % patch for size, patch in zip(video.shape[2:], self.patch_size, strict=True)
        ]
        frames, rows, columns = missing
        output: Tensor = self.proj(F.pad(video, (0, columns, 0, rows, 0, frames)))
        return output


class ScalarEmbedder(nn.Module):
    """One number per sample, a timestep or a frame rate, as a vector."""

    def __init__(self, dim: int) -> None:
        """Make vectors of ``dim`` channels."""
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed values of shape (batch,)."""
        waves = get_timestep_embedding(
            values, _FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0
        )
        output: Tensor = self.mlp(waves.to(dtype))
        return output


class CaptionEmbedder(nn.Module):
    """The text encoder's output in the channels of the network, and what stands for no text."""

    def __init__(self, caption_channels: int, *, dim: int, max_length: int) -> None:
        """Project ``caption_channels`` to ``dim``; keep an empty text of ``max_length`` tokens."""
        super().__init__()
        self.y_proj = FeedForward(caption_channels, dim, out_dim=dim)
        self.y_embedding: Tensor
        empty = torch.randn(max_length, caption_channels) / caption_channels**0.5
        self.register_buffer("y_embedding", empty)

    def forward(self, text: Tensor) -> Tensor:
        """Project the text."""
        output: Tensor = self.y_proj(text)
        return output
