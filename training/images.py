"""Sample grids, captioned sheets and loss curves as PNG files. Knows pixels and numbers only."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from PIL import Image
from torch import Tensor

from ertacache.figures import SERIES, new_figure, styled, to_png

__all__ = ["save_curve", "save_film", "save_grid", "save_sheet"]


def _to_pil(pixels: Tensor) -> Image.Image:
    """Turn (3, height, width) in [-1, 1] into an image."""
    levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte()
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def save_grid(images: Tensor, path: Path, *, columns: int) -> None:
    """Save a batch (batch, 3, height, width) in [-1, 1] as rows of touching tiles."""
    rows = -(-len(images) // columns)
    images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(images)))
    height, width = images.shape[2:]
    tiles = images.view(rows, columns, 3, height, width).permute(2, 0, 3, 1, 4)
    _to_pil(tiles.reshape(3, rows * height, columns * width)).save(path)


def _strip(pixels: Tensor, frames: int = 5) -> Tensor:
    """Frames of a video (3, frames, height, width), evenly spread, side by side."""
    if pixels.ndim == 3:
        return pixels
    chosen = pixels[:, :: max(1, (pixels.shape[1] - 1) // (frames - 1))]
    return F.pad(chosen, (0, 1), value=1.0).transpose(1, 2).flatten(2)


@styled()
def save_sheet(images: Tensor, captions: Sequence[str], path: Path, *, columns: int) -> None:
    """Save a batch with the caption of each image, or strip of frames, below it."""
    images = torch.stack([_strip(image) for image in images])
    rows = -(-len(images) // columns)
    wide = images.shape[-1] / images.shape[-2]
    cell = (1.55, 2.1) if wide < 2 else (0.7 * wide, 1.0)  # inches; strips are low
    letters, below = (22, -0.07) if wide < 2 else (60, -0.2)
    figure = new_figure(cell[0] * columns, cell[1] * rows, constrained=False)
    axes = figure.subplots(rows, columns)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image, text in zip(axes.flat, images, captions, strict=False):
        axis.imshow(_to_pil(image), interpolation="nearest")
        axis.set_title(textwrap.fill(text, letters), fontsize=7, y=below, va="top")
    figure.subplots_adjust(0.005, 0.05, 0.995, 0.995, wspace=0.08, hspace=0.42)
    path.write_bytes(to_png(figure, dpi=110))


def save_film(videos: Tensor, path: Path, *, columns: int, scale: int = 2) -> None:
    """Save a batch (batch, 3, frames, height, width) as one animated image of tiles."""
    rows = len(videos) // columns
    tiles = videos[: rows * columns].unflatten(0, (rows, columns)).permute(3, 2, 0, 4, 1, 5)
    frames = [
        image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)
        for image in map(_to_pil, tiles.flatten(4, 5).flatten(2, 3))
    ]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, loop=0, quality=80)


@styled()
def save_curve(log: Path, path: Path, *, title: str) -> None:
    """Draw the loss of a training log over its steps."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    figure = new_figure(6, 3)
    axis = figure.subplots()
    line = SERIES[0].options(marker="", linewidth=1.2)
    axis.semilogy([row["step"] for row in rows], [row["loss"] for row in rows], **line)
    axis.set(xlabel="step", ylabel="loss", title=title)
    axis.grid(visible=True, which="both")
    path.write_bytes(to_png(figure, dpi=100))
