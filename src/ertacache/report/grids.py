"""Grids of images in labelled rows, and amplified differences.

Draws tensors with values from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ertacache.metrics.image import to_image

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["difference", "grid"]

GAP = 6
TEXT_HEIGHT = 16


def difference(result: Tensor, reference: Tensor, *, gain: float = 8.0) -> Tensor:
    """The absolute difference of two images times ``gain``, cut off at 1.

    Example:
        >>> import torch
        >>> difference(torch.tensor([0.5, 0.75]), torch.tensor([0.5, 0.5]), gain=2.0)
        tensor([0.0000, 0.5000])
    """
    return ((result - reference).abs() * gain).clamp(0, 1)


def grid(rows: Sequence[tuple[str, Tensor]], *, scale: int = 1) -> Image.Image:
    """Rows of images, each under its label.

    Args:
        rows: a label and images of shape (B, 3, height, width), the same for all rows.
        scale: width at which a pixel is drawn.
    """
    from PIL import Image, ImageDraw, ImageFont

    count, _, height, width = rows[0][1].shape
    cell = width * scale + GAP, height * scale + GAP + TEXT_HEIGHT
    sheet = Image.new("RGB", (count * cell[0] + GAP, len(rows) * cell[1] + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT_HEIGHT - 4)
    for i, (label, images) in enumerate(rows):
        draw.text((GAP, i * cell[1] + GAP // 2), label, fill="black", font=font)
        for j, image in enumerate(images):
            place = j * cell[0] + GAP, i * cell[1] + GAP // 2 + TEXT_HEIGHT
            sheet.paste(to_image(image, scale=scale), place)
    return sheet
