"""Train the small autoencoders of the bundled models from nothing.

    python -m training.autoencoders flux --checkpoints checkpoints

One row per autoencoder. The finished one is written to CHECKPOINTS/vae-NAME/final with its latent
statistics in the configuration. Knows nothing of text or transformers.
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

from training.data import render, scenes, spread
from training.loop import Schedule, load_ema, train
from training.patches import PatchBasis, patch_basis
from training.pictures import save_grid

__all__ = ["AUTOENCODERS", "Autoencoder", "AutoencoderTask", "finish", "psnr"]


def _image() -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _wan() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=8,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
        scale_factor_spatial=4,
        scale_factor_temporal=4,
    )


def _cogvideox() -> AutoencoderKLCogVideoX:
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(16, 32, 32),
        latent_channels=8,
        layers_per_block=1,
        norm_num_groups=8,
        temporal_compression_ratio=4,
        sample_height=32,
        sample_width=32,
    )


@dataclass(frozen=True)
class Autoencoder:
    """One row: an architecture, what it sees, how it is trained.

    Attributes:
        build: Makes the untrained model.
        side: Canvas side in pixels.
        frames: 1 for images.
        schedule: Length and speed of the training.
    """

    build: Callable[[], Any]
    side: int
    frames: int
    schedule: Schedule

    @property
    def video(self) -> bool:
        """Whether scenes move."""
        return self.frames > 1


AUTOENCODERS = {
    "flux": Autoencoder(_image, 64, 1, Schedule(3500, 8, 2e-3, ema=0.998, preview_every=500)),
    "wan": Autoencoder(_wan, 32, 17, Schedule(8000, 2, 1e-3, ema=0.998, preview_every=500)),
    "cogvideox": Autoencoder(
        _cogvideox, 32, 17, Schedule(8000, 2, 1e-3, ema=0.998, preview_every=500)
    ),
}


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels of pixels in [-1, 1]."""
    return float(10 * torch.log10(4 / (a - b).pow(2).mean()))


def _edges(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.diff(dim=-1), x.diff(dim=-2)


def _reconstruction(x: Tensor, y: Tensor) -> Tensor:
    edges = sum((a - b).abs().mean() for a, b in zip(_edges(x), _edges(y), strict=True))
    return (x - y).abs().mean() + (x - y).pow(2).mean() + 0.5 * edges


class AutoencoderTask:
    """Reconstruct freshly drawn scenes, in pixels and in edges, from latents with a little noise.

    With a patch basis the latents are given: the encoder learns to produce them, the decoder to
    invert them. Without one they are found together, held near the origin by a weak penalty.
    """

    penalty = 1e-3
    latent_noise = 0.03  # standard deviation; what the decoder must forgive

    def __init__(self, row: Autoencoder, basis: PatchBasis | None = None) -> None:
        """Build the untrained model of a row."""
        self.row, self.basis = row, basis
        self.modules = nn.ModuleDict({"vae": row.build()})
        self.pool = scenes("train", video=row.video)
        self.unseen = spread(scenes("test", video=row.video), 32 if row.frames == 1 else 8, seed=1)

    def draw(self, step: int) -> Tensor:
        """The pixels of one training batch."""
        batch = random.Random(step).choices(self.pool, k=self.row.schedule.batch)
        return render(batch, self.row.side, seed=step, frames=self.row.frames)

    def loss(self, step: int) -> Tensor:
        """One training batch."""
        x, vae = self.draw(step), self.modules["vae"]
        if self.basis is None:
            posterior = vae.encode(x).latent_dist
            z = posterior.mean
            loss = self.penalty * z.pow(2).mean() + self._spread_loss(posterior.logvar)
        else:
            z, loss = self.basis.encode(x), torch.zeros(())
            if step % 4 == 0:  # a linear map is easily learnt
                posterior = vae.encode(x).latent_dist
                loss = (posterior.mean - z).pow(2).mean() + self._spread_loss(posterior.logvar)
        y = vae.decode(z + self.latent_noise * torch.randn_like(z)).sample
        return _reconstruction(x, y) + loss

    def _spread_loss(self, logvar: Tensor) -> Tensor:
        """Teach the encoder to state the noise that the decoder was trained with."""
        return 1e-3 * (logvar - 2 * math.log(self.latent_noise)).pow(2).mean()

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Unseen scenes above their reconstructions."""
        x = render(self.unseen, self.row.side, seed=-1, frames=self.row.frames)
        latents = modules["vae"].encode(x).latent_dist.mode()
        figures = {}
        if self.basis is not None:
            given = self.basis.encode(x)
            figures["latent_error"] = float((latents - given).pow(2).mean().sqrt())
            latents = given
        y = modules["vae"].decode(latents).sample.clamp(-1, 1)
        pairs = torch.cat([x, y])
        if self.row.video:  # one row of frames per video
            pairs = pairs.transpose(1, 2).flatten(0, 1)
        save_grid(pairs, path, columns=self.row.frames if self.row.video else len(x) // 2)
        return figures | {"psnr": psnr(x, y)}


def finish(name: str, folder: Path) -> None:
    """Measure the latents of training scenes, write them into the configuration, and save."""
    row = AUTOENCODERS[name]
    task = AutoencoderTask(row)
    load_ema(task.modules, folder)
    vae = task.modules["vae"].eval()
    count = 512 if row.frames == 1 else 64
    batch = spread(task.pool, count, seed=2)
    with torch.no_grad():
        pixels = render(batch, row.side, seed=-2, frames=row.frames)
        latents = torch.cat([vae.encode(x).latent_dist.mode() for x in pixels.split(8)])
    mean, std = latents.mean(), latents.std()
    if name == "wan":
        axes = (0, 2, 3, 4)
        means, stds = latents.mean(axes).tolist(), latents.std(axes).tolist()
        vae.register_to_config(latents_mean=means, latents_std=stds)
    elif name == "flux":  # its latents are the patch basis, which is scaled already
        vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    else:
        vae.register_to_config(scaling_factor=1 / float(std))
    vae.save_pretrained(folder / "final")
    print(f"latents {tuple(latents.shape[1:])} mean {mean:.3f} std {std:.3f}")


def main() -> None:
    """Train one autoencoder and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(AUTOENCODERS))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.checkpoints / f"vae-{args.name}"
    torch.manual_seed(args.seed)
    row = AUTOENCODERS[args.name]
    basis = patch_basis(args.checkpoints) if args.name == "flux" else None
    train(AutoencoderTask(row, basis), row.schedule, folder, seed=args.seed)
    finish(args.name, folder)


if __name__ == "__main__":
    main()
