"""What the baselines know of each architecture: one row per network, one field per method.

To support another network, add a row to ``ARCHITECTURES``. A field that is left out means that the
method in question does not apply, or that it has nothing special to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ertacache.baselines.blocks import BlockCall

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "AttentionRanges",
    "GuidanceBatch",
    "LatentVideos",
    "find_architecture",
    "find_architecture_of_block",
]

ModulatedInput = Callable[[BlockCall, "Tensor | None"], Tensor]
"""The modulated input of a call, from the first block's arguments and the time embedding."""

Videos = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], list[Tensor]]
"""The latents among a network's arguments, as videos (C, F, H, W), one per row of the batch."""


@dataclass(frozen=True)
class LatentVideos:
    """How SeaCache reads the latents.

    Attributes:
        read: reads them off the network's arguments; None where diffusers does that itself.
    """

    read: Videos | None = None


@dataclass(frozen=True)
class GuidanceBatch:
    """How FasterCache sees the two branches of guidance.

    Attributes:
        batched: whether both are rows of one call, the unconditional one first.
        tensor_format: the axes of the latents.
    """

    batched: bool
    tensor_format: str = "BCHW"


@dataclass(frozen=True)
class AttentionRanges:
    """Where and when PAB reuses attention; by default as published for CogVideoX.

    Attributes:
        timesteps: the range of timesteps.
        spatial: the module lists with attention over space; diffusers' own names if empty.
        temporal: the module lists with attention over time, if a network separates it.
    """

    timesteps: tuple[int, int] = (100, 850)
    spatial: tuple[str, ...] = ()
    temporal: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """One network.

    Attributes:
        network: the class of the network.
        block: the class of its first block.
        modulated_input: what TeaCache compares from step to step.
        time_embedder: the submodule whose first output TeaCache needs as time embedding, if no
            block is given it.
        latent_videos: how SeaCache reads the latents.
        guidance: how FasterCache sees the branches of guidance.
        attention: where and when PAB reuses attention.
        text_first: whether a batch with both branches of guidance begins with the text's, for
            T-GATE.
    """

    network: str
    block: str
    modulated_input: ModulatedInput | None = None
    time_embedder: str | None = None
    latent_videos: LatentVideos | None = None
    guidance: GuidanceBatch | None = None
    attention: AttentionRanges = AttentionRanges()
    text_first: bool = False


def find_architecture(network: nn.Module) -> Architecture | None:
    """Return the row of a network, None if it has none."""
    name = type(network).__name__
    return next((row for row in ARCHITECTURES if row.network == name), None)


def find_architecture_of_block(block: nn.Module) -> Architecture | None:
    """Return the row of a first block, which variants of a network share; None without one."""
    name = type(block).__name__
    return next((row for row in ARCHITECTURES if row.block == name), None)


def _flux_input(call: BlockCall, time: Tensor | None) -> Tensor:
    norm: Any = call.block.norm1
    modulated: Tensor = norm(call.arguments["hidden_states"], emb=call.arguments["temb"])[0]
    return modulated


def _wan_input(call: BlockCall, time: Tensor | None) -> Tensor:
    assert time is not None  # the time embedder is run before the first block
    return time


def _cogvideox_input(call: BlockCall, time: Tensor | None) -> Tensor:
    embedding: Tensor = call.arguments["temb"]
    return embedding


def _opensora_input(call: BlockCall, time: Tensor | None) -> Tensor:
    block: Any = call.block
    given = (call.arguments[name] for name in ("hidden_states", "modulation"))
    modulated: Tensor = block.modulated_input(*given)
    return modulated


def _flux_videos(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tokens (B, N, C) with their positions, as images (C, 1, H, W)."""
    positions: Tensor = kwargs["img_ids"]
    height, width = (int(positions[..., axis].max()) + 1 for axis in (1, 2))
    tokens: Tensor = kwargs["hidden_states"]
    return [one.T.reshape(-1, 1, height, width) for one in tokens]


def _cogvideox_videos(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Videos (B, F, C, H, W) with channels first."""
    videos: Tensor = kwargs["hidden_states"]
    return list(videos.transpose(1, 2).unbind(0))


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        network="FluxTransformer2DModel",
        block="FluxTransformerBlock",
        modulated_input=_flux_input,
        latent_videos=LatentVideos(_flux_videos),
        guidance=GuidanceBatch(batched=False),
    ),
    Architecture(
        network="WanTransformer3DModel",
        block="WanTransformerBlock",
        modulated_input=_wan_input,
        time_embedder="condition_embedder",
        latent_videos=LatentVideos(),
        guidance=GuidanceBatch(batched=False),
    ),
    Architecture(
        network="CogVideoXTransformer3DModel",
        block="CogVideoXBlock",
        modulated_input=_cogvideox_input,
        latent_videos=LatentVideos(_cogvideox_videos),
        guidance=GuidanceBatch(batched=True, tensor_format="BFCHW"),
    ),
    Architecture(
        network="HunyuanVideoTransformer3DModel",
        block="HunyuanVideoTransformerBlock",
        guidance=GuidanceBatch(batched=False),
    ),
    Architecture(
        network="OpenSoraTransformer3DModel",
        block="OpenSoraBlock",
        modulated_input=_opensora_input,
        # Published together with reused feed-forward layers, which diffusers does not implement.
        attention=AttentionRanges((450, 930), ("spatial_blocks",), ("temporal_blocks",)),
        text_first=True,
    ),
)
"""All rows."""
