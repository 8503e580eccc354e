"""Scenes of one emoji on a plain background: their captions, their split, their pixels.

A scene is a subject with attributes. Images have a position, videos have a motion instead. For
every subject a seeded pair of backgrounds is left out of training, and the test split consists of
exactly those combinations. Everything is a pure function of its arguments: two processes draw the
same pixels. Knows nothing of models.
"""

from __future__ import annotations

import functools
import itertools
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from training.subjects import BACKGROUNDS, MOTIONS, POSITIONS, SIZES, SUBJECTS

__all__ = [
    "Scene",
    "all_words",
    "caption",
    "heldout_backgrounds",
    "other_captions",
    "render",
    "scenes",
    "spread",
]

_FONT_SIZE = 109  # the only size of this bitmap font
_GLYPH = 72  # side of a stored glyph in pixels, with a transparent margin of one pixel
_MARGIN = 0.03  # space between the subject and the edge of the canvas, in canvas sides


@dataclass(frozen=True)
class Scene:
    """One subject with its attributes, all of them keys of the tables in `training.subjects`.

    Attributes:
        subject: What is shown.
        size: How large it is.
        background: The colour behind it.
        position: Where it is; ``None`` for videos.
        motion: What it does; ``None`` for images.
    """

    subject: str
    size: str
    background: str
    position: str | None = None
    motion: str | None = None


def caption(scene: Scene) -> str:
    """The sentence that describes a scene.

    Example:
        >>> caption(Scene("apple", "small", "blue", position="left"))
        'a small apple on a blue background at the left'
        >>> caption(Scene("panda", "large", "red", motion="moving up"))
        'a large panda on a red background moving up'
    """
    text = f"a {scene.size} {scene.subject} on a {scene.background} background"
    if scene.position is not None:
        return f"{text} at the {scene.position}"
    return text if scene.motion is None else f"{text} {scene.motion}"


def other_captions(scene: Scene) -> list[str]:
    """What people write instead: with a capital letter, or with less.

    Example:
        >>> for text in other_captions(Scene("apple", "small", "blue", position="left")):
        ...     print(text)
        A small apple on a blue background at the left
        A small apple on a blue background
        a small apple on a blue background
        an apple on a blue background
        a small apple
        an apple
    """
    full, less = caption(scene), caption(replace(scene, position=None, motion=None))
    subject = f"{'an' if scene.subject[0] in 'aeiou' else 'a'} {scene.subject}"
    return [
        f"A{full[1:]}",
        f"A{less[1:]}",
        less,
        f"{subject} on a {scene.background} background",
        f"a {scene.size} {scene.subject}",
        subject,
    ]


def all_words() -> list[str]:
    """Every word that a caption can contain, sorted."""
    tables = (SUBJECTS, SIZES, BACKGROUNDS, POSITIONS, MOTIONS)
    phrases = itertools.chain(["a on background at the"], *tables)
    return sorted({word for phrase in phrases for word in phrase.split()})


def heldout_backgrounds(subject: str) -> frozenset[str]:
    """The two backgrounds that never stand behind a subject in training."""
    return frozenset(random.Random(f"heldout {subject}").sample(sorted(BACKGROUNDS), 2))


def scenes(split: str, *, video: bool = False) -> list[Scene]:
    """All scenes of a split, in the order of the tables.

    Args:
        split: ``"train"`` or ``"test"``.
        video: Whether scenes have a motion (videos) or a position (images).
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'test'")
    found = []
    for subject, size, background in itertools.product(SUBJECTS, SIZES, BACKGROUNDS):
        if (background in heldout_backgrounds(subject)) != (split == "test"):
            continue
        if video:
            found += [Scene(subject, size, background, motion=m) for m in MOTIONS]
        else:
            found += [Scene(subject, size, background, position=p) for p in POSITIONS]
    return found


def spread(pool: Sequence[Scene], count: int, *, seed: int) -> list[Scene]:
    """Choose scenes without repetition, as evenly over the subjects as possible."""
    rng = random.Random(seed)
    by_subject: dict[str, list[Scene]] = {name: [] for name in SUBJECTS}
    for scene in rng.sample(list(pool), len(pool)):
        by_subject[scene.subject].append(scene)
    rounds = itertools.zip_longest(*by_subject.values())
    chosen: list[Scene] = []
    for row in rounds:
        present = [scene for scene in row if scene is not None]
        chosen += rng.sample(present, len(present))
        if len(chosen) >= count:
            return chosen[:count]
    raise ValueError(f"{count} scenes are wanted, but there are only {len(chosen)}")


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    query = ["fc-match", "-f", "%{file}", "Noto Color Emoji"]
    path = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    if "NotoColorEmoji" not in path:
        raise FileNotFoundError(
            "Noto Color Emoji is missing: apt-get install fonts-noto-color-emoji"
        )
    return ImageFont.truetype(path, _FONT_SIZE)


def _glyph(character: str) -> Tensor:
    """One emoji, cropped and centred on a square, as premultiplied RGBA in [0, 1]."""
    image = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(image).text((8, 8), character, font=_font(), embedded_color=True)
    image = image.crop(image.getbbox())
    side = max(image.size)
    square = Image.new("RGBA", (side, side))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    small = square.resize((_GLYPH - 2, _GLYPH - 2), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.asarray(small).copy()).float().permute(2, 0, 1) / 255
    pixels[:3] *= pixels[3:]
    return F.pad(pixels, (1, 1, 1, 1))


@functools.cache
def _glyphs() -> Tensor:
    """All subjects in the order of the table, shape (subjects, 4, side, side)."""
    return torch.stack([_glyph(character) for character in SUBJECTS.values()])


def _draw(subject: Tensor, colour: Tensor, placement: Tensor, side: int) -> Tensor:
    """Draw a batch with twofold supersampling.

    Args:
        subject: Row of each glyph, shape (batch,).
        colour: Backgrounds in [0, 1], shape (batch, 3).
        placement: Centre x, centre y in [0, 1], side as a fraction, angle; shape (batch, 4).
        side: Canvas side in pixels.
    """
    x, y, size, angle = placement.unbind(1)
    cos, sin = angle.cos() / size, angle.sin() / size
    u, v = 2 * x - 1, 2 * y - 1  # the canvas is [-1, 1]; theta maps canvas to glyph
    theta = torch.stack([cos, sin, -cos * u - sin * v, -sin, cos, sin * u - cos * v], dim=1).view(
        -1, 2, 3
    )
    grid = F.affine_grid(theta, [len(x), 4, 2 * side, 2 * side], align_corners=False)
    layer = F.grid_sample(_glyphs()[subject], grid, align_corners=False)
    layer = F.avg_pool2d(layer, 2)
    return layer[:, :3] + (1 - layer[:, 3:]) * colour[:, :, None, None]


def _path(scene: Scene, frames: int, rng: random.Random, jitter: float) -> Tensor:
    """Placement of the subject in every frame, shape (frames, 4)."""
    size = SIZES[scene.size] * (1 + jitter * (rng.uniform(0.94, 1.06) - 1))
    free = 0.5 - size / 2 - _MARGIN
    at_x, at_y = POSITIONS[scene.position or "center"]
    x = 0.5 + at_x * free + jitter * rng.uniform(-0.03, 0.03)
    y = 0.5 + at_y * free + jitter * rng.uniform(-0.03, 0.03)
    path = torch.tensor([x, y, size, 0.0]).repeat(frames, 1)
    if scene.motion is None:
        return path
    s = torch.linspace(0, 1, frames)
    travel = (2 * s - 1) * (0.5 - size / 2) * rng.uniform(0.9, 1.0)
    axis = {"left": (0, -1), "right": (0, 1), "up": (1, -1), "down": (1, 1)}
    if scene.motion.startswith("moving"):
        column, sign = axis[scene.motion.split()[1]]
        path[:, column] += sign * travel
    elif scene.motion == "spinning":
        path[:, 3] = 2 * torch.pi * s * rng.uniform(0.95, 1.05)
    elif scene.motion == "bouncing":
        path[:, 1] += (0.5 - size / 2) * (1 - 2 * (2 * torch.pi * s).sin().abs())
    else:
        scale = 0.5 + 0.5 * s if scene.motion == "growing" else 1 - 0.5 * s
        path[:, 2] *= scale * 1.2
    return path


def render(
    batch: Sequence[Scene], side: int, *, seed: int, frames: int = 1, jitter: float = 1.0
) -> Tensor:
    """Draw scenes with a slight jitter of place and size.

    Args:
        batch: What to draw.
        side: Canvas side in pixels.
        seed: Decides the jitter, together with each scene itself.
        frames: 1 for images.
        jitter: Its strength; 1 is 3 % of the canvas to either side and 6 % of the size.

    Returns:
        Pixels in [-1, 1], shape (batch, 3, side, side), for videos (batch, 3, frames, side, side).
    """
    rows = list(SUBJECTS)
    paths = [_path(scene, frames, random.Random(f"{seed} {scene}"), jitter) for scene in batch]
    subject = torch.tensor([rows.index(scene.subject) for scene in batch])
    colour = torch.tensor([BACKGROUNDS[scene.background] for scene in batch]) / 255
    pixels = _draw(
        subject.repeat_interleave(frames),
        colour.repeat_interleave(frames, 0),
        torch.cat(paths),
        side,
    )
    pixels = pixels.clamp(0, 1) * 2 - 1
    if frames == 1:
        return pixels
    return pixels.view(len(batch), frames, 3, side, side).transpose(1, 2)
