"""Train the small autoencoders of the bundled models from nothing.

    python -m training.autoencoders flux --checkpoints checkpoints

One row per autoencoder. The latents are those of `training.patches`, so its transformer can be
trained at the same time. Knows nothing of text or transformers.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLCogVideoX, AutoencoderKLWan
from torch import Tensor, nn

from ertacache.models.opensora import AutoencoderKLOpenSora
from training.data import render, scenes, spread
from training.graft import graft_folder
from training.images import save_grid
from training.loop import Schedule, load_ema, train
from training.patches import SPACES, PatchBasis, Space, frame_basis, patch_basis

__all__ = ["AUTOENCODERS", "Autoencoder", "AutoencoderTask", "load_autoencoder", "psnr"]


def _image() -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=20,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _wan() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=12,
        z_dim=16,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 16,  # the latents are scaled already
        latents_std=[1.0] * 16,
        scale_factor_spatial=4,
        scale_factor_temporal=4,
    )


def _cogvideox() -> AutoencoderKLCogVideoX:
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 16, 32),
        latent_channels=16,
        layers_per_block=1,
        norm_num_groups=8,
        temporal_compression_ratio=4,
        sample_height=32,
        sample_width=32,
        scaling_factor=1.0,  # the latents are scaled already
    )


def _opensora() -> AutoencoderKLOpenSora:
    return AutoencoderKLOpenSora(
        latent_channels=16,
        spatial_block_out_channels=(16, 32, 64),
        spatial_layers_per_block=1,
        spatial_norm_num_groups=8,
        spatial_scaling_factor=1.0,
        temporal_block_out_channels=(32, 48, 64),
        temporal_downsample=(True, True),
        temporal_layers_per_block=1,
        temporal_norm_num_groups=8,
        micro_batch_size=17,  # a whole video
        latents_mean=(0.0,) * 16,  # the latents are scaled already
        latents_std=(1.0,) * 16,
    )


def _between(vae: AutoencoderKLOpenSora, x: Tensor, z: Tensor, encode: bool) -> Tensor:
    """Teach each stage its own half of the way: between them lie components of single frames."""
    frames = x.transpose(1, 2)
    w = frame_basis(SPACES["video"]).encode(frames.flatten(0, 1))
    w = w.unflatten(0, frames.shape[:2]).transpose(1, 2)
    loss = (vae.temporal_vae.decode(z, num_frames=x.shape[2]) - w).pow(2).mean()
    if encode:
        mean = vae.temporal_vae.encode(w).chunk(2, dim=1)[0]
        loss = loss + (mean - z).pow(2).mean()
        loss = loss + (vae.spatial_vae.encode(x, None) - w).pow(2).mean()
    return loss


@dataclass(frozen=True)
class Autoencoder:
    """One row: an architecture, the latents it has to learn, how it is trained.

    Attributes:
        build: Makes the untrained model.
        space: The latents, and what is drawn.
        schedule: Length and speed of the training.
        clip: Frames of a clip.
        crop: Side of a clip in pixels. Of many small clips a step learns more than of few whole
            videos; every fourth step takes one whole video all the same, for its edges.
        aid: A further loss of the model, its pixels and latents, and whether the step encodes.
    """

    build: Callable[[], Any]
    space: Space
    schedule: Schedule
    clip: int = 1
    crop: int = 0
    aid: Callable[[Any, Tensor, Tensor, bool], Tensor] | None = None


AUTOENCODERS = {
    "flux": Autoencoder(
        _image,
        SPACES["image"],
        Schedule(5000, 8, 2e-3, ema=0.998, preview_every=500, decay=1500),
    ),
    "wan": Autoencoder(
        _wan, SPACES["video"], Schedule(3500, 8, 3e-3, ema=0.998, preview_every=500), 9, 16
    ),
    "cogvideox": Autoencoder(
        _cogvideox, SPACES["video"], Schedule(3500, 8, 3e-3, ema=0.998, preview_every=500), 9, 16
    ),
    "opensora": Autoencoder(
        _opensora,
        SPACES["video"],
        Schedule(3500, 8, 2e-3, ema=0.998, preview_every=500),
        17,
        16,
        _between,
    ),
}
_ENCODE_EVERY = 4  # steps between two that also train the encoder: a linear map is easily learnt


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels of pixels in [-1, 1]."""
    return float(10 * torch.log10(4 / (a - b).pow(2).mean()))


def _edges(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.diff(dim=-1), x.diff(dim=-2)


def _reconstruction(x: Tensor, y: Tensor) -> Tensor:
    edges = sum((a - b).abs().mean() for a, b in zip(_edges(x), _edges(y), strict=True))
    return (x - y).abs().mean() + (x - y).pow(2).mean() + 0.5 * edges


class AutoencoderTask:
    """Reconstruct freshly drawn scenes, in pixels and in edges, from given latents.

    The latents are those of the patch basis, with a little noise: the encoder learns to produce
    them, the decoder to invert them better than a linear map can.
    """

    latent_noise = 0.03  # standard deviation; what the decoder must forgive

    def __init__(self, row: Autoencoder, basis: PatchBasis) -> None:
        """Build the untrained model of a row."""
        self.row, self.space, self.basis = row, row.space, basis
        self.modules = nn.ModuleDict({"vae": row.build()})
        self.pool = scenes("train", video=row.space.video)
        count = 8 if row.space.video else 32
        self.unseen = spread(scenes("test", video=row.space.video), count, seed=1)

    def draw(self, step: int) -> Tensor:
        """The pixels of one training batch, of videos mostly clips."""
        rng = random.Random(step)
        whole = self.space.video and step % 4 == 2
        batch = rng.choices(self.pool, k=1 if whole else self.row.schedule.batch)
        pixels = render(batch, self.space.side, seed=step, frames=self.space.frames)
        if whole or not self.space.video:
            return pixels
        start = rng.randrange(self.space.frames - self.row.clip + 1)
        i, j = (4 * rng.randrange((self.space.side - self.row.crop) // 4 + 1) for _ in "xy")
        end, side = start + self.row.clip, self.row.crop
        return pixels[:, :, start:end, i : i + side, j : j + side].contiguous()

    def loss(self, step: int) -> Tensor:
        """One training batch."""
        x, vae = self.draw(step), self.modules["vae"]
        z, loss = self.basis.encode(x), torch.zeros(())
        encode = step % _ENCODE_EVERY == 0
        if self.row.aid is not None:
            loss = loss + self.row.aid(vae, x, z, encode)
        if encode:
            posterior = vae.encode(x).latent_dist
            loss = loss + (posterior.mean - z).pow(2).mean() + self._spread_loss(posterior.logvar)
        y = vae.decode(z + self.latent_noise * torch.randn_like(z)).sample
        return _reconstruction(x, y) + loss

    def _spread_loss(self, logvar: Tensor) -> Tensor:
        """Teach the encoder to state the noise that the decoder was trained with."""
        return 1e-3 * (logvar - 2 * math.log(self.latent_noise)).pow(2).mean()

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Unseen scenes above their reconstructions."""
        x = render(self.unseen, self.space.side, seed=-1, frames=self.space.frames)
        given, found = self.basis.encode(x), modules["vae"].encode(x).latent_dist.mode()
        y = modules["vae"].decode(given).sample.clamp(-1, 1)
        pairs = torch.cat([x, y])
        if self.space.video:  # one row of frames per video
            pairs = pairs.transpose(1, 2).flatten(0, 1)
        save_grid(pairs, path, columns=self.space.frames if self.space.video else len(x) // 2)
        error = float((found - given).pow(2).mean().sqrt())
        return {"latent_error": error, "psnr": psnr(x, y)}


def load_autoencoder(name: str, checkpoints: Path) -> Any:
    """The trained autoencoder of a row, with averaged weights."""
    row = AUTOENCODERS[name]
    task = AutoencoderTask(row, patch_basis(checkpoints, row.space))
    load_ema(task.modules, checkpoints / f"vae-{name}")
    vae = task.modules["vae"].eval()
    if name == "flux":  # its latents are scaled already; the class has no neutral default
        vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    return vae


def main() -> None:
    """Train one autoencoder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(AUTOENCODERS))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="diffusers folder of an earlier model")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    row = AUTOENCODERS[args.name]
    task = AutoencoderTask(row, patch_basis(args.checkpoints, row.space))
    if args.start:
        print("grown:", *graft_folder(task.modules, args.start))
    train(task, row.schedule, args.checkpoints / f"vae-{args.name}", seed=args.seed)


if __name__ == "__main__":
    main()
