"""The temporal autoencoder of Open-Sora 1.2: causal convolutions that shorten a video four times.

It works on the latents of a spatial autoencoder and keeps their height and width. Names of
parameters are those of the published weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["CausalConv3d", "TemporalDecoder", "TemporalEncoder", "TemporalVAE"]


class CausalConv3d(nn.Module):
    """A convolution over the current and past frames."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int,
        stride: int = 1,
        bias: bool = True,
    ) -> None:
        """Create a cubic kernel; ``stride`` is in time."""
        super().__init__()
        side, past = kernel // 2, kernel - stride
        self._padding = (side, side, side, side, past, 0)
        self.conv = nn.Conv3d(in_channels, out_channels, kernel, stride=(stride, 1, 1), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a tensor of shape (batch, channels, frames, height, width)."""
        output: Tensor = self.conv(F.pad(x, self._padding))
        return output


class ResidualBlock(nn.Module):
    """Two normalised convolutions, added to their input."""

    def __init__(self, in_channels: int, out_channels: int, *, groups: int) -> None:
        """Project the input if the number of channels changes."""
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels, kernel=3, bias=False)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels, kernel=3, bias=False)
        self.conv3: nn.Module | None = None
        if in_channels != out_channels:
            self.conv3 = CausalConv3d(in_channels, out_channels, kernel=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        shortcut = x if self.conv3 is None else self.conv3(x)
        x = self.conv1(F.silu(self.norm1(x)))
        x = self.conv2(F.silu(self.norm2(x)))
        return x + shortcut


def _stack(channels: Sequence[int], *, groups: int) -> nn.ModuleList:
    """Residual blocks from each number of channels to the next."""
    return nn.ModuleList(
        ResidualBlock(here, there, groups=groups) for here, there in pairwise(channels)
    )


class TemporalEncoder(nn.Module):
    """Levels of residual blocks, some followed by a convolution that halves the frames."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        widths: Sequence[int],
        halve: Sequence[bool],
        layers: int,
        groups: int,
    ) -> None:
        """Create one level per width; ``halve`` has an entry per transition between levels."""
        super().__init__()
        self.conv_in = CausalConv3d(in_channels, widths[0], kernel=3, bias=False)
        before = [widths[0], *widths[:-1]]
        self.block_res_blocks = nn.ModuleList(
            _stack([last, *[width] * layers], groups=groups)
            for last, width in zip(before, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, width, kernel=3, stride=2) if shorter else nn.Identity()
            for width, shorter in zip(widths, halve, strict=False)
        )
        self.res_blocks = _stack([widths[-1]] * (layers + 1), groups=groups)
        self.norm1 = nn.GroupNorm(groups, widths[-1])
        self.conv2 = CausalConv3d(widths[-1], out_channels, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        """Encode; the number of frames must be a multiple of the compression."""
        x = self.conv_in(x)
        for level, blocks in enumerate(self.block_res_blocks):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
            if level < len(self.conv_blocks):
                x = self.conv_blocks[level](x)
        for block in self.res_blocks:
            x = block(x)
        output: Tensor = self.conv2(F.silu(self.norm1(x)))
        return output


class TemporalDecoder(nn.Module):
    """Mirror of the encoder: upsampling splits channels into twice as many frames."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        widths: Sequence[int],
        halve: Sequence[bool],
        layers: int,
        groups: int,
    ) -> None:
        """Create one level per width; the last runs first, as the published keys require."""
        super().__init__()
        self.conv1 = CausalConv3d(in_channels, widths[-1], kernel=3)
        self.res_blocks = _stack([widths[-1]] * (layers + 1), groups=groups)
        before = [*widths[1:], widths[-1]]
        self.block_res_blocks = nn.ModuleList(
            _stack([last, *[width] * layers], groups=groups)
            for last, width in zip(before, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, 2 * width, kernel=3) if longer else nn.Identity()
            for width, longer in zip(widths[1:], halve, strict=True)
        )
        self.norm1 = nn.GroupNorm(groups, widths[0])
        self.conv_out = CausalConv3d(widths[0], out_channels, kernel=3)

    def forward(self, x: Tensor) -> Tensor:
        """Decode; the number of frames is a multiple of the compression."""
        x = self.conv1(x)
        for block in self.res_blocks:
            x = block(x)
        for level in reversed(range(len(self.block_res_blocks))):
            for block in self.block_res_blocks[level]:  # type: ignore[attr-defined]
                x = block(x)
            if level > 0:
                x = _unfold_frames(self.conv_blocks[level - 1], x)
        output: Tensor = self.conv_out(F.silu(self.norm1(x)))
        return output


def _unfold_frames(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Identity):
        return x
    doubled: Tensor = layer(x).unflatten(1, (-1, 2))  # adjacent channels are adjacent frames
    return doubled.transpose(2, 3).flatten(2, 3)


class TemporalVAE(nn.Module):
    """Temporal encoder and decoder, and the layers between them."""

    def __init__(
        self,
        channels: int,
        *,
        widths: Sequence[int],
        halve: Sequence[bool],
        layers: int,
        groups: int,
    ) -> None:
        """Create encoder and decoder for latents of ``channels`` channels."""
        super().__init__()
        if len(halve) != len(widths) - 1:
            raise ValueError(f"{len(widths)} levels need {len(widths) - 1} entries, got {halve}")
        self.compression: int = 2 ** sum(halve)
        self.encoder = TemporalEncoder(
            channels, 2 * channels, widths=widths, halve=halve, layers=layers, groups=groups
        )
        self.quant_conv = CausalConv3d(2 * channels, 2 * channels, kernel=1)
        self.post_quant_conv = CausalConv3d(channels, channels, kernel=1)
        self.decoder = TemporalDecoder(
            channels, channels, widths=widths, halve=halve, layers=layers, groups=groups
        )

    def latent_frames(self, num_frames: int) -> int:
        """Number of latent frames of ``num_frames`` frames."""
        return -(-num_frames // self.compression)

    def encode(self, x: Tensor) -> Tensor:
        """Return means and log-variances, stacked along the channels.

        Zeros before the first frame make the number of frames a multiple of the compression.
        """
        missing = -x.shape[2] % self.compression
        moments: Tensor = self.quant_conv(self.encoder(F.pad(x, (0, 0, 0, 0, missing, 0))))
        return moments

    def decode(self, z: Tensor, *, num_frames: int) -> Tensor:
        """Return the last ``num_frames`` decoded frames."""
        x: Tensor = self.decoder(self.post_quant_conv(z))
        return x[:, :, -num_frames % self.compression :]
