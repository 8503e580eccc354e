"""Sample grids, captioned sheets and loss curves as PNG files. Knows pixels and numbers only."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F  # noqa: N812  (the usual name)
from PIL import Image
from torch import Tensor

__all__ = ["save_curve", "save_grid", "save_sheet"]


def _to_pil(pixels: Tensor) -> Image.Image:
    """Turn (3, height, width) in [-1, 1] into a picture."""
    levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte()
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def save_grid(images: Tensor, path: Path, *, columns: int) -> None:
    """Save a batch (batch, 3, height, width) in [-1, 1] as rows of touching tiles."""
    rows = -(-len(images) // columns)
    images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(images)))
    height, width = images.shape[2:]
    tiles = images.view(rows, columns, 3, height, width).permute(2, 0, 3, 1, 4)
    _to_pil(tiles.reshape(3, rows * height, columns * width)).save(path)


def save_sheet(images: Tensor, captions: Sequence[str], path: Path, *, columns: int) -> None:
    """Save a batch with the caption of each image below it."""
    from matplotlib import pyplot

    rows = -(-len(images) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(1.55 * columns, 2.1 * rows))
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image, text in zip(axes.flat, images, captions, strict=False):
        axis.imshow(_to_pil(image), interpolation="nearest")
        axis.set_title(textwrap.fill(text, 22), fontsize=7, y=-0.07, va="top")
    figure.subplots_adjust(0.005, 0.05, 0.995, 0.995, wspace=0.08, hspace=0.42)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def save_curve(log: Path, path: Path, *, title: str) -> None:
    """Draw the loss of a training log over its steps."""
    from matplotlib import pyplot

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axis = pyplot.subplots(figsize=(6, 3))
    axis.semilogy([row["step"] for row in rows], [row["loss"] for row in rows])
    axis.set(xlabel="step", ylabel="loss", title=title)
    axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
