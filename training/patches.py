"""The latent spaces of the bundled models: principal components of small blocks of pixels.

A block is 4 x 4 pixels of an image, or 4 x 4 pixels of four frames of a video; the first frame of
a video is a block of its own, standing still. The latents are fixed before any training by the
statistics of the renderings, so a transformer can be trained while its autoencoder is still
learning to produce and to decode them. Component k is divided by the square root of its standard
deviation: coarse colour stays louder than fine detail, the mean variance is one. Knows nothing of
networks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.data import render, scenes, spread

__all__ = ["SPACES", "PatchBasis", "Space", "bank", "frame_basis", "patch_basis"]

_PATCH = 4  # pixels per latent, in space
_FRAMES = 4  # frames per latent, but for the first


@dataclass(frozen=True)
class Space:
    """One row: what is drawn, and into how many numbers a block of it goes.

    Attributes:
        side: Canvas side in pixels.
        frames: 1 for images.
        channels: Components that are kept.
        jitters: Renderings of each training scene in the bank.
        fitted: Training scenes that the components are found on.
        suffix: Distinguishes the files of this space from those of others.
        jitter: How much place and size vary in the bank; see `training.data.render`.
    """

    side: int
    frames: int
    channels: int
    jitters: int
    fitted: int
    suffix: str
    jitter: float = 1.0

    @property
    def video(self) -> bool:
        """Whether scenes move."""
        return self.frames > 1


SPACES = {
    "image": Space(64, 1, channels=20, jitters=16, fitted=1500, suffix="flux", jitter=0.5),
    "video": Space(32, 17, channels=16, jitters=4, fitted=600, suffix="video"),
}


def _fold(pixels: Tensor) -> Tensor:
    """Blocks as channels: (..., 3 * 16, h, w) for images, (batch, 3 * 64, n, h, w) for videos."""
    if pixels.ndim == 4:
        return F.pixel_unshuffle(pixels, _PATCH)
    still = pixels[:, :, :1].expand(-1, -1, _FRAMES - 1, -1, -1)
    groups = torch.cat([still, pixels], dim=2).unflatten(2, (-1, _FRAMES)).transpose(1, 2)
    return F.pixel_unshuffle(groups.flatten(2, 3), _PATCH).transpose(1, 2)


def _unfold(blocks: Tensor) -> Tensor:
    """The inverse of `_fold`; the still frames of the first block are averaged."""
    if blocks.ndim == 4:
        return F.pixel_shuffle(blocks, _PATCH)
    groups = F.pixel_shuffle(blocks.transpose(1, 2), _PATCH).unflatten(2, (3, _FRAMES))
    frames = groups.transpose(1, 2).flatten(2, 3)
    first = frames[:, :, :_FRAMES].mean(2, keepdim=True)
    return torch.cat([first, frames[:, :, _FRAMES:]], dim=2)


@dataclass(frozen=True)
class PatchBasis:
    """A linear map between pixels and latents.

    Attributes:
        mean: Mean block, shape (values,).
        encoder: Block to latent, shape (channels, values).
        decoder: Its pseudo-inverse, shape (values, channels).
    """

    mean: Tensor
    encoder: Tensor
    decoder: Tensor

    def encode(self, pixels: Tensor) -> Tensor:
        """Map (batch, 3, ..., side, side) to (batch, channels, ..., side / 4, side / 4)."""
        blocks = _fold(pixels).movedim(1, -1) - self.mean
        return (blocks @ self.encoder.T).movedim(-1, 1)

    def decode(self, latents: Tensor) -> Tensor:
        """The best linear reconstruction."""
        return _unfold((latents.movedim(1, -1) @ self.decoder.T + self.mean).movedim(-1, 1))


def _fit(pixels: Tensor, channels: int) -> PatchBasis:
    blocks = _fold(pixels).movedim(1, -1).flatten(0, -2).double()
    mean = blocks.mean(0)
    values, vectors = torch.linalg.eigh((blocks - mean).T.cov())
    values, vectors = values.flip(0)[:channels], vectors.flip(1)[:, :channels]
    vectors = vectors * vectors.sum(0).sign()  # the sign of an eigenvector is arbitrary
    scale = values.pow(0.25) * values.sqrt().mean().sqrt()
    return PatchBasis(mean.float(), (vectors / scale).T.float(), (vectors * scale).float())


def patch_basis(checkpoints: Path, space: Space) -> PatchBasis:
    """The basis of a checkpoint folder, fitted on training scenes when it is not there yet."""
    path = checkpoints / f"patches-{space.suffix}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = spread(scenes("train", video=space.video), space.fitted, seed=3)
        basis = _fit(render(chosen, space.side, seed=-3, frames=space.frames), space.channels)
        save_file({key: value.contiguous() for key, value in vars(basis).items()}, path)
    return PatchBasis(**load_file(path))


@functools.cache
def frame_basis(space: Space) -> PatchBasis:
    """As many components of single frames of a video as its latents have channels."""
    chosen = spread(scenes("train", video=True), 64, seed=3)
    pixels = render(chosen, space.side, seed=-3, frames=space.frames)[:, :, ::4]
    return _fit(pixels.transpose(1, 2).flatten(0, 1), space.channels)


def bank(checkpoints: Path, space: Space) -> Tensor:
    """Latents of every training scene, several renderings each, kept on disk.

    Returns:
        Shape (jitters, scenes, channels, ..., height, width), half precision.
    """
    path = checkpoints / f"bank-{space.suffix}.safetensors"
    if not path.exists():
        basis, pool = patch_basis(checkpoints, space), scenes("train", video=space.video)

        def latents(start: int, seed: int) -> Tensor:
            chosen = pool[start : start + 128]
            pixels = render(chosen, space.side, seed=seed, frames=space.frames, jitter=space.jitter)
            return basis.encode(pixels).half()

        rows = [
            torch.cat([latents(start, seed) for start in range(0, len(pool), 128)])
            for seed in range(space.jitters)
        ]
        save_file({"latents": torch.stack(rows).contiguous()}, path)
    return load_file(path)["latents"]
