"""The modules of STDiT3: embeddings of its inputs, attention over space or time, modulation.

Hidden states have the shape (batch, frames, patches, channels) throughout. Names of parameters are
those of the published weights.
"""

from __future__ import annotations

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = [
    "CaptionEmbedder",
    "CrossAttention",
    "FeedForward",
    "FinalLayer",
    "OpenSoraBlock",
    "PatchEmbed",
    "RotaryEmbedding",
    "ScalarEmbedder",
    "SelfAttention",
    "modulate",
    "position_embedding",
    "rotate",
]

_FREQUENCIES = 256  # of the sinusoidal embedding of a timestep or a frame rate

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each of shape (positions, half the channels of a head)."""


def modulate(hidden_states: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
    """Adaptive layer norm without the norm: ``x (1 + scale) + shift``."""
    return hidden_states * (1 + scale) + shift


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair of adjacent channels by the angle of its position.

    Example:
        >>> quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> rotate(torch.tensor([[3.0, 4.0]]), quarter)
        tensor([[-4.,  3.]])
    """
    cos, sin = rotary
    first, second = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.flatten(-2)


class RotaryEmbedding(nn.Module):
    """Rotary angles of the frames; the frequencies are stored with the weights, not trained."""

    def __init__(self, dim: int, *, theta: float = 10000.0) -> None:
        """Create the frequencies of heads of ``dim`` channels."""
        super().__init__()
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.freqs = nn.Parameter(theta**-exponents, requires_grad=False)

    def forward(self, length: int) -> Rotary:
        """Return cosines and sines of ``length`` positions."""
        positions = torch.arange(length, device=self.freqs.device, dtype=self.freqs.dtype)
        angles = torch.outer(positions, self.freqs)
        return angles.cos(), angles.sin()


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, inner_dim: int, *, out_dim: int | None = None) -> None:
        """Map ``dim`` over ``inner_dim`` to ``out_dim`` channels, ``dim`` if not given."""
        super().__init__()
        self.fc1 = nn.Linear(dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, dim if out_dim is None else out_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply both layers to the last dimension."""
        inner = F.gelu(self.fc1(hidden_states), approximate="tanh")
        output: Tensor = self.fc2(inner)
        return output


def position_embedding(
    rows: int, columns: int, *, dim: int, scale: float, device: torch.device
) -> Tensor:
    """Sinusoidal embedding of each patch position, column first, shape (patches, dim).

    Both axes are stretched to the side of a square with the same number of patches, and divided by
    ``scale``, the ratio of the image size to the base resolution of the network.

    Example:
        >>> position_embedding(1, 2, dim=4, scale=1.0, device=torch.device("cpu"))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.4794, 0.8776, 0.0000, 1.0000]])
    """
    side = round((rows * columns) ** 0.5)
    exponents = torch.arange(0, dim // 2, 2, dtype=torch.float32, device=device) / (dim // 2)
    freqs = 1.0 / 10000**exponents

    def encode(length: int) -> Tensor:
        positions = torch.arange(length, device=device) / scale * (side / length)
        angles = torch.outer(positions, freqs)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    x = encode(columns).expand(rows, columns, -1)
    y = encode(rows)[:, None].expand(rows, columns, -1)
    return torch.cat([x, y], dim=-1).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Embedding of the patches of a video; incomplete patches are padded with zeros."""

    def __init__(self, patch_size: tuple[int, int, int], *, in_channels: int, dim: int) -> None:
        """Embed patches of ``patch_size`` (frames, rows, columns) in ``dim`` channels."""
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv3d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, video: Tensor) -> Tensor:
        """Return shape (batch, dim, frames, rows, columns), the last three counted in patches."""
        missing = [
            -size % patch for size, patch in zip(video.shape[2:], self.patch_size, strict=True)
        ]
        frames, rows, columns = missing
        output: Tensor = self.proj(F.pad(video, (0, columns, 0, rows, 0, frames)))
        return output


class ScalarEmbedder(nn.Module):
    """Embedding of one number per sample: a timestep or a frame rate."""

    def __init__(self, dim: int) -> None:
        """Embed in ``dim`` channels."""
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
    """Projection of the text encoder's output, and the learned null text."""

    def __init__(self, caption_channels: int, *, dim: int, max_length: int) -> None:
        """Project ``caption_channels`` to ``dim``; the null text has ``max_length`` tokens."""
        super().__init__()
        self.y_proj = FeedForward(caption_channels, dim, out_dim=dim)
        self.y_embedding: Tensor
        empty = torch.randn(max_length, caption_channels) / caption_channels**0.5
        self.register_buffer("y_embedding", empty)

    def forward(self, text: Tensor) -> Tensor:
        """Project the text."""
        output: Tensor = self.y_proj(text)
        return output


class SelfAttention(nn.Module, AttentionModuleMixin):
    """Attention within a sequence, queries and keys normalised before they are rotated."""

    is_cross_attention = False
    processor = None  # type: ignore[assignment]
    _supports_qkv_fusion = False  # there is one projection already

    def __init__(self, dim: int, *, heads: int, qk_norm: bool) -> None:
        """Divide ``dim`` channels among ``heads``."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.RMSNorm(dim // heads, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim // heads, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, hidden_states: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Attend in a tensor of shape (sequences, length, channels)."""
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        output = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.proj(output.transpose(1, 2).flatten(2))
        return projected


class CrossAttention(nn.Module, AttentionModuleMixin):
    """Attention of all patches of a video to its text."""

    is_cross_attention = True
    processor = None  # type: ignore[assignment]
    _supports_qkv_fusion = False

    def __init__(self, dim: int, *, heads: int) -> None:
        """Divide ``dim`` channels among ``heads``."""
        super().__init__()
        self.heads = heads
        self.q_linear = nn.Linear(dim, dim)
        self.kv_linear = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, hidden_states: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to ``text`` (batch, tokens, channels) where ``mask`` (batch, tokens) is True."""
        query = self.q_linear(hidden_states.flatten(1, 2)).unflatten(-1, (self.heads, -1))
        key, value = self.kv_linear(text).unflatten(-1, (2, self.heads, -1)).unbind(2)
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None, None],
        )
        projected: Tensor = self.proj(output.transpose(1, 2).flatten(2))
        return projected.view_as(hidden_states)


class OpenSoraBlock(nn.Module):
    """Attention over the patches of each frame, or over the frames of each patch."""

    def __init__(
        self, dim: int, *, heads: int, mlp_ratio: float, qk_norm: bool, temporal: bool
    ) -> None:
        """Attend over time if ``temporal``, over space otherwise."""
        super().__init__()
        self.temporal = temporal
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = SelfAttention(dim, heads=heads, qk_norm=qk_norm)
        self.cross_attn = CrossAttention(dim, heads=heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mlp = FeedForward(dim, int(dim * mlp_ratio))
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        hidden_states: Tensor,
        text: Tensor,
        text_mask: Tensor | None,
        modulation: Tensor,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """Apply the block.

        Args:
            hidden_states: shape (batch, frames, patches, channels).
            text: shape (batch, tokens, channels).
            text_mask: shape (batch, tokens), False for padding; None without padding.
            modulation: shape (batch, frames or 1, 6, channels).
            rotary: angles of the frames, for a temporal block.
        """
        x: Tensor = hidden_states
        _, _, gate, mlp_shift, mlp_scale, mlp_gate = self._factors(modulation)
        x = x + gate * self._attend(self.modulated_input(x, modulation), rotary)
        x = x + self.cross_attn(x, text, text_mask)
        x = x + mlp_gate * self.mlp(modulate(self.norm2(x), shift=mlp_shift, scale=mlp_scale))
        return x

    def modulated_input(self, hidden_states: Tensor, modulation: Tensor) -> Tensor:
        """Return the input of the self-attention; arguments as in ``forward``."""
        shift, scale, *_ = self._factors(modulation)
        return modulate(self.norm1(hidden_states), shift=shift, scale=scale)

    def _factors(self, modulation: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of the self-attention, then those of the feed-forward layer."""
        return (self.scale_shift_table + modulation).chunk(6, dim=2)

    def _attend(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        if not self.temporal:
            output: Tensor = self.attn(x.flatten(0, 1))
            return output.view_as(x)
        columns = x.transpose(1, 2)
        output = self.attn(columns.flatten(0, 1), rotary)
        return output.view_as(columns).transpose(1, 2)


class FinalLayer(nn.Module):
    """Projection of hidden states to the latent values of each patch."""

    def __init__(self, dim: int, out_dim: int) -> None:
        """Project to ``out_dim`` values per patch."""
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, out_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)

    def forward(self, hidden_states: Tensor, time_embedding: Tensor) -> Tensor:
        """Modulate by a time embedding of shape (batch, frames or 1, channels), and project."""
        shift, scale = (self.scale_shift_table + time_embedding[:, :, None]).chunk(2, dim=2)
        output: Tensor = self.linear(
            modulate(self.norm_final(hidden_states), shift=shift, scale=scale)
        )
        return output
