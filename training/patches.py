"""The latent space of `emoji-flux`: principal components of 4 x 4 pixel patches.

The latents are fixed before any training by the statistics of the renderings, so the transformer
can be trained while the autoencoder is still learning to produce and to decode them. Component k
is divided by the square root of its standard deviation: coarse colour stays louder than fine
detail, the mean variance is one. Knows nothing of networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.data import render, scenes, spread

__all__ = ["PatchBasis", "bank", "patch_basis"]

_PATCH = 4
_CHANNELS = 8
_JITTERS = 6  # renderings of each training scene in the bank


@dataclass(frozen=True)
class PatchBasis:
    """A linear map between pixels and latents.

    Attributes:
        mean: Mean patch, shape (48,).
        encoder: Patch to latent, shape (channels, 48).
        decoder: Its pseudo-inverse, shape (48, channels).
    """

    mean: Tensor
    encoder: Tensor
    decoder: Tensor

    def encode(self, pixels: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, channels, side / 4, side / 4)."""
        patches = F.pixel_unshuffle(pixels, _PATCH) - self.mean[:, None, None]
        return torch.einsum("cp,bphw->bchw", self.encoder, patches)

    def decode(self, latents: Tensor) -> Tensor:
        """The best linear reconstruction."""
        patches = torch.einsum("pc,bchw->bphw", self.decoder, latents) + self.mean[:, None, None]
        return F.pixel_shuffle(patches, _PATCH)


def _fit(pixels: Tensor) -> PatchBasis:
    patches = F.pixel_unshuffle(pixels, _PATCH).movedim(1, -1).flatten(0, 2).double()
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh((patches - mean).T.cov())
    values, vectors = values.flip(0)[:_CHANNELS], vectors.flip(1)[:, :_CHANNELS]
    vectors = vectors * vectors.sum(0).sign()  # the sign of an eigenvector is arbitrary
    scale = values.pow(0.25) * values.sqrt().mean().sqrt()
    return PatchBasis(mean.float(), (vectors / scale).T.float(), (vectors * scale).float())


def patch_basis(checkpoints: Path) -> PatchBasis:
    """The basis of a checkpoint folder, fitted on training scenes when it is not there yet."""
    path = checkpoints / "patches.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        basis = _fit(render(spread(scenes("train"), 1500, seed=3), 64, seed=-3))
        save_file({key: value.contiguous() for key, value in vars(basis).items()}, path)
    return PatchBasis(**load_file(path))


def bank(checkpoints: Path) -> Tensor:
    """Latents of every training scene, several renderings each, kept on disk.

    Returns:
        Shape (jitters, scenes, channels, height, width), half precision.
    """
    path = checkpoints / "bank-flux.safetensors"
    if not path.exists():
        basis, pool = patch_basis(checkpoints), scenes("train")
        starts = range(0, len(pool), 128)
        rows = [
            torch.cat([basis.encode(render(pool[k : k + 128], 64, seed=j)).half() for k in starts])
            for j in range(_JITTERS)
        ]
        save_file({"latents": torch.stack(rows)}, path)
    return load_file(path)["latents"]
