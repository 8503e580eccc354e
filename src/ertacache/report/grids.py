"""Grids and rows of labelled images, and amplified differences.

Draws tensors with values from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ertacache.metrics.image import to_image

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["difference", "grid", "labelled_row"]

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


def labelled_row(panels: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Images or videos in a row, each under its label, pixel by pixel as they are.

    A label that is wider than its image has white beside the image.

    Args:
        panels: a label and an image (3, height, width) or a video (frames, 3, height, width) each,
            of one shape.
    """
    import torch
    from torch.nn.functional import pad

    labels = [_draw_label(text) for text, _ in panels]
    width = max(panels[0][1].shape[-1], *(label.shape[-1] for label in labels))
    columns = []
    for label, (_, panel) in zip(labels, panels, strict=True):
        above, shown = (
            pad(each, (0, width - each.shape[-1]), value=1.0) for each in (label, panel.cpu())
        )
        columns.append(torch.cat([above.expand(*shown.shape[:-2], -1, -1), shown], dim=-2))
    return torch.cat(columns, dim=-1)


def _draw_label(text: str) -> Tensor:
    """A label as an image (3, height, width) of even sides, which videos need."""
    import torch
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(TEXT_HEIGHT - 4)
    width = 2 * math.ceil(font.getlength(text) / 2 + 1)
    image = Image.new("RGB", (width, TEXT_HEIGHT), "white")
    ImageDraw.Draw(image).text((1, 0), text, fill="black", font=font)
    levels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return levels.reshape(TEXT_HEIGHT, width, 3).movedim(-1, 0) / 255


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
