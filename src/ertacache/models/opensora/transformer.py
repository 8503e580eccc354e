"""STDiT3, the network of Open-Sora 1.2, as a diffusers model.

It maps a noisy latent, a timestep and a text to a velocity (and a variance that is not used). The
keys and shapes of its ``state_dict`` are those of the published weights.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from ertacache.models.opensora.blocks import (
    CaptionEmbedder,
    FinalLayer,
    OpenSoraBlock,
    PatchEmbed,
    RotaryEmbedding,
    ScalarEmbedder,
    position_embedding,
)
from ertacache.models.opensora.original import load_original, transformer_config

__all__ = ["OpenSoraTransformer3DModel"]


class OpenSoraTransformer3DModel(ModelMixin, ConfigMixin, CacheMixin):  # type: ignore[misc]
    """STDiT3: pairs of a spatial and a temporal block. The defaults are those of STDiT3-XL/2.

    Args:
        num_attention_heads: heads of every attention.
        attention_head_dim: channels of a head.
        num_layers: pairs of blocks.
        in_channels: channels of the latent.
        out_channels: channels of the output; the first ``in_channels`` are the velocity.
        patch_size: frames, rows and columns of a patch.
        mlp_ratio: inner channels of a feed-forward layer, relative to the outer ones.
        caption_channels: channels of the text encoder's output.
        max_sequence_length: tokens of the longest text.
        qk_norm: whether queries and keys are normalised.
        base_resolution: side in pixels of the square that positions are scaled to.

    Example:
        >>> tiny = OpenSoraTransformer3DModel(2, 8, num_layers=1, caption_channels=6)
        >>> video, text = torch.zeros(1, 4, 5, 4, 4), torch.zeros(1, 3, 6)
        >>> call = {"timestep": torch.tensor([1000.0]), "fps": 24.0, "height": 32, "width": 32}
        >>> tiny(video, encoder_hidden_states=text, **call).sample.shape
        torch.Size([1, 8, 5, 4, 4])
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["OpenSoraBlock"]  # type: ignore[assignment]  # noqa: RUF012

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        num_layers: int = 28,
        in_channels: int = 4,
        out_channels: int = 8,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        mlp_ratio: float = 4.0,
        caption_channels: int = 4096,
        max_sequence_length: int = 300,
        qk_norm: bool = True,
        base_resolution: int = 512,
    ) -> None:
        """Initialise the network with fresh weights."""
        super().__init__()  # type: ignore[no-untyped-call]
        dim = num_attention_heads * attention_head_dim
        if dim % 4 or attention_head_dim % 2:
            raise ValueError(
                f"{num_attention_heads} heads of {attention_head_dim} channels: the head must be "
                "even and the product a multiple of 4, for the sines and cosines of positions"
            )
        frames, rows, columns = self.patch_size = (*patch_size,)  # a list in a saved config
        self.rope = RotaryEmbedding(attention_head_dim)
        self.x_embedder = PatchEmbed(self.patch_size, in_channels=in_channels, dim=dim)
        self.t_embedder = ScalarEmbedder(dim)
        self.fps_embedder = ScalarEmbedder(dim)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.y_embedder = CaptionEmbedder(caption_channels, dim=dim, max_length=max_sequence_length)
        layer: dict[str, Any] = {
            "heads": num_attention_heads,
            "mlp_ratio": mlp_ratio,
            "qk_norm": qk_norm,
        }
        self.spatial_blocks = nn.ModuleList(
            OpenSoraBlock(dim, temporal=False, **layer) for _ in range(num_layers)
        )
        self.temporal_blocks = nn.ModuleList(
            OpenSoraBlock(dim, temporal=True, **layer) for _ in range(num_layers)
        )
        self.final_layer = FinalLayer(dim, frames * rows * columns * out_channels)
        self.gradient_checkpointing = False
        self._initialize()

    def _initialize(self) -> None:
        """Initialise as an image network: temporal blocks and frame rates contribute nothing."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        rates: Any = self.fps_embedder.mlp
        nn.init.normal_(rates[0].weight, std=0.02)
        zeroed = [rates[2]]
        blocks: Any = self.temporal_blocks
        for block in blocks:
            zeroed += [block.attn.proj, block.cross_attn.proj, block.mlp.fc2]
        for layer in zeroed:
            nn.init.zeros_(layer.weight)

    @classmethod
    def from_original(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, **config: Any
    ) -> OpenSoraTransformer3DModel:
        """Load the published weights.

        Args:
            source: the ``.safetensors`` file, a folder that holds it, with or without its
                ``config.json``, or the hub id ``hpcai-tech/OpenSora-STDiT-v3``.
            dtype: precision of the weights.
            config: overrides of the ``config.json``, by the argument names of this class.
        """
        return load_original(
            cls, source, read_config=transformer_config, changes=config, dtype=dtype
        )

    @property
    def ordered_blocks(self) -> list[nn.Module]:
        """The blocks in the order in which they run."""
        pairs = zip(self.spatial_blocks, self.temporal_blocks, strict=True)
        return [block for pair in pairs for block in pair]

    def null_text(self, length: int) -> Tensor:
        """Return the learned null text, shape (length, caption channels)."""
        longest = len(self.y_embedder.y_embedding)
        if length > longest:
            raise ValueError(
                f"the text has {length} tokens, but the network takes at most {longest}"
            )
        return self.y_embedder.y_embedding[:length]

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        *,
        fps: float | Tensor,
        height: int,
        width: int,
        frame_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the velocity from noise to data.

        Args:
            hidden_states: the noisy latent, shape (batch, channels, frames, height, width).
            timestep: shape (batch,), from 1000 (noise) to 0 (data).
            encoder_hidden_states: the text, shape (batch, tokens, caption channels).
            encoder_attention_mask: shape (batch, tokens), zero for padding.
            fps: frames per second, of all videos or shape (batch,).
            height: height in pixels.
            width: width in pixels.
            frame_mask: shape (batch, frames), False for latent frames without noise.
            return_dict: whether to return the output class rather than a tuple.

        Returns:
            The output, always float32, shape (batch, out channels, frames, height, width).
        """
        if frame_mask is not None and self.patch_size[0] > 1:
            raise ValueError("a frame_mask needs patches of one frame; these patches span several")
        dtype = self.x_embedder.proj.weight.dtype
        time = self._embed_time(timestep, fps, frame_mask, dtype)
        modulation = self.t_block(time).unflatten(-1, (6, -1))
        text = self.y_embedder(encoder_hidden_states.to(dtype))
        mask = None if encoder_attention_mask is None else encoder_attention_mask != 0
        x = self.x_embedder(hidden_states.to(dtype))
        grid = x.shape[2:]
        scale = (height * width) ** 0.5 / self.config["base_resolution"]
        x = x.flatten(3).permute(0, 2, 3, 1) + position_embedding(
            grid[1], grid[2], dim=x.shape[1], scale=scale, device=x.device
        ).to(dtype)
        rotary = self.rope(grid[0])
        for block in self.ordered_blocks:
            x = self._run(block, x, text, mask, modulation, rotary)
        x = self._unpatchify(self.final_layer(x, time), grid, hidden_states.shape).float()
        return Transformer2DModelOutput(sample=x) if return_dict else (x,)

    def _run(self, block: nn.Module, *args: Any) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            checkpoint: Any = self._gradient_checkpointing_func
            return checkpoint(block, *args)
        return block(*args)

    def _embed_time(
        self, timestep: Tensor, fps: float | Tensor, frame_mask: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Embed timestep and frame rate, shape (batch, frames or 1, channels)."""
        # The published network was trained with timesteps rounded to its own precision.
        timestep = timestep.to(dtype)
        rates = torch.as_tensor(fps, device=timestep.device, dtype=dtype).expand_as(timestep)
        rate = self.fps_embedder(rates, dtype)
        noisy: Tensor = (self.t_embedder(timestep, dtype) + rate)[:, None]
        if frame_mask is None:
            return noisy
        clean = (self.t_embedder(torch.zeros_like(timestep), dtype) + rate)[:, None]
        return torch.where(frame_mask[:, :, None], noisy, clean)

    def _unpatchify(self, x: Tensor, grid: torch.Size, shape: torch.Size) -> Tensor:
        """Reassemble the patches and remove the padding of the last ones."""
        _, rows, columns = grid
        x = x.reshape(*x.shape[:2], rows, columns, *self.patch_size, -1)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)  # batch, channels, then each axis: patch and inside
        x = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return x[:, :, : shape[2], : shape[3], : shape[4]]
