"""Pictures of pictures: rows side by side with their labels, and differences made visible.

Draws tensors with values from 0 to 1. Knows neither models nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["difference", "grid", "to_picture"]

GAP = 6
TEXT_HEIGHT = 16


def to_picture(pixels: Tensor, *, scale: int = 1) -> Image.Image:
    """Turn (3, height, width) with values from 0 to 1 into a picture, each pixel ``scale`` wide."""
    from PIL import Image

    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array)
    size = picture.width * scale, picture.height * scale
    return picture.resize(size, Image.Resampling.NEAREST)


def difference(result: Tensor, reference: Tensor, *, gain: float = 8.0) -> Tensor:
    """Where two pictures differ: black where they agree, ``gain`` times the difference elsewhere.

    Example:
        >>> difference(torch.tensor([0.5, 0.75]), torch.tensor([0.5, 0.5]), gain=2.0)
        tensor([0.0000, 0.5000])
    """
    return ((result - reference).abs() * gain).clamp(0, 1)


def grid(rows: Sequence[tuple[str, Tensor]], *, scale: int = 1) -> Image.Image:
    """Rows of pictures, each under its label.

    Args:
        rows: a label and pictures of shape (B, 3, height, width), the same for all rows.
        scale: how wide a pixel is drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    count, _, height, width = rows[0][1].shape
    cell = width * scale + GAP, height * scale + GAP + TEXT_HEIGHT
    sheet = Image.new("RGB", (count * cell[0] + GAP, len(rows) * cell[1] + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT_HEIGHT - 4)
    for i, (label, pictures) in enumerate(rows):
        draw.text((GAP, i * cell[1] + GAP // 2), label, fill="black", font=font)
        for j, picture in enumerate(pictures):
            place = j * cell[0] + GAP, i * cell[1] + GAP // 2 + TEXT_HEIGHT
            sheet.paste(to_picture(picture, scale=scale), place)
    return sheet
