"""Images and videos inside the page, and pairs of them under a divider that can be dragged.

A video is one image with its frames below one another, which the page moves along: all videos of a
page play in step, and without a script. Left of the divider is the full run, right of it the other.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ertacache.metrics import psnr
from ertacache.metrics.files import media_files, read_media
from ertacache.metrics.image import to_levels
from ertacache.report.tables import scrollable

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["compared_pairs", "film", "pairs_html", "samples_html"]

FRAME_SECONDS = 0.08
SHOWN_SIDE = 96  # pixels at which a small image is shown in a table, at least
PAIR_SIDE = 256  # pixels at which one of a pair is shown, at least
LARGEST_SIDE = 640  # pixels, of what is stored
LONGEST_SIDE = 16_000  # pixels of the frames below one another; WebP has no more than 16383
EXACT_SIDE = 256  # pixels up to which nothing is lost
QUALITY = 88  # of larger ones
FULL_NAME = "-full"  # how ``generate --compare`` calls the full run


def film(
    levels: Tensor, text: str, *, name: str = "", full: str = "", side: int = SHOWN_SIDE
) -> str:
    """An image (3, height, width) or a video (frames, 3, height, width), bytes, as HTML.

    Args:
        levels: the pixels.
        text: what it shows.
        name: identifier of a full run, by which others find it.
        full: identifier of the full run that it is compared with.
        side: width at which it is shown, at least.
    """
    frames = levels[None] if levels.ndim == 3 else levels
    number, _, height, width = frames.shape
    scale = min(1.0, LARGEST_SIDE / max(height, width), LONGEST_SIDE / (number * height))
    strip = _strip(frames, max(1, round(scale * width)), max(1, round(scale * height)))
    data = io.BytesIO()
    exact = scale == 1 and max(height, width) <= EXACT_SIDE
    strip.save(data, format="WEBP", lossless=exact, quality=100 if exact else QUALITY)
    source = base64.b64encode(data.getvalue()).decode()
    style = f"--frames:{number};--seconds:{number * FRAME_SECONDS:g}s;"
    style += f"width:{max(side, strip.width)}px;aspect-ratio:{width}/{height}"
    kinds = ["film", *["moving"] * (number > 1), *["small"] * (width < side)]
    marks = (f' id="{name}"' if name else "") + (f' data-full="{full}"' if full else "")
    return (
        f'<div class="{" ".join(kinds)}" style="{style}"{marks}>'
        f'<img alt="{escape(text)}" src="data:image/webp;base64,{source}"></div>'
    )


def _strip(frames: Tensor, width: int, height: int) -> Image.Image:
    """Frames below one another, each of this size."""
    from PIL import Image

    strip = Image.new("RGB", (width, height * len(frames)))
    for place, frame in enumerate(frames):
        image = Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy())
        strip.paste(image.resize((width, height), Image.Resampling.LANCZOS), (0, place * height))
    return strip


def samples_html(
    title: str,
    prompts: Sequence[str],
    found: Mapping[tuple[str, float], Tensor],
    shown: Sequence[tuple[str, float]],
    *,
    name: str,
) -> str:
    """One row per method, one column per prompt; the full run is the first of ``shown``.

    Args:
        title: what the rows are.
        prompts: the head of every column.
        found: bytes of shape (prompts, ..., 3, height, width) by method and budget.
        shown: the rows; those without images are left out.
        name: identifier of the table, of which there is one on the page.
    """
    full, *others = [key for key in shown if key in found] or [("", 0.0)]
    if not others:
        return ""
    head = "".join(f'<th scope="col">{escape(prompt)}</th>' for prompt in prompts)
    lines = []
    for key in (full, *others):
        cells = []
        for place, levels in enumerate(found[key]):
            number = f"{name}-{place}"
            name_of, full_of = (number, "") if key == full else ("", number)
            text = f"{key[0]}: {prompts[place]}"
            cells.append(f"<td>{film(levels, text, name=name_of, full=full_of)}</td>")
        lines.append(f'<tr><th scope="row">{escape(key[0])}</th>{"".join(cells)}</tr>')
    table = (
        f'<table class="samples"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )
    shown_table = scrollable(table, name=title)
    return f'<section class="compare"><h4>{escape(title)}</h4>{shown_table}</section>'


def compared_pairs(folder: Path) -> list[tuple[str, Path, Path]]:
    """Name, full run and accelerated run of every pair that ``generate --compare`` wrote.

    Raises:
        ValueError: there is no pair.
    """
    files = {path.with_suffix("").as_posix(): path for path in media_files(folder).values()}
    pairs = [
        (path.stem, files[name + FULL_NAME], path)
        for name, path in files.items()
        if name + FULL_NAME in files
    ]
    if not pairs:
        raise ValueError(
            f"{str(folder)!r} has no image or video with its full run (NAME.png and "
            f"NAME{FULL_NAME}.png): make them with ertacache generate --compare"
        )
    return pairs


def pairs_html(pairs: Sequence[tuple[str, Path, Path]], *, name: str) -> Iterator[str]:
    """Every pair as a figure with its PSNR; one piece of HTML each."""
    for place, (title, full, fast) in enumerate(pairs):
        reference, result = read_media(full), read_media(fast)
        if reference.shape != result.shape:
            raise ValueError(f"{str(full)!r} and {str(fast)!r} differ in size or length")
        close = float(psnr(result[None], reference[None])[0])
        text = "identical" if close == inf else f"PSNR {close:.1f} dB to the full run, of the files"
        number = f"{name}-{place}"
        yield (
            '<figure class="pair">'
            f"{film(to_levels(reference), f'{title}: full run', name=number, side=PAIR_SIDE)}"
            f"{film(to_levels(result), f'{title}: accelerated', full=number, side=PAIR_SIDE)}"
            f"<figcaption>{escape(title)}: {text}</figcaption></figure>"
        )
