"""Images and videos on disk: reading them as tensors, and pairing two folders by name.

An image has shape (3, height, width), a video (frames, 3, height, width), values from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ertacache.metrics.image import to_pixels

__all__ = [
    "FilePair",
    "Pairing",
    "is_video",
    "lossy_codec",
    "media_files",
    "pair_files",
    "read_media",
]

IMAGES = {".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
VIDEOS = {".avi", ".gif", ".mkv", ".mov", ".mp4", ".webm"}
LOSSLESS = {"ffv1", "ffvhuff", "huffyuv", "png", "qtrle", "rawvideo", "utvideo"}
EIGHT_BIT = {"1", "CMYK", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "YCbCr"}


@dataclass(frozen=True)
class FilePair:
    """Two files of the same name.

    Attributes:
        name: path of both, relative to their folders.
        result: the file that is evaluated.
        reference: what it is compared with.
    """

    name: str
    result: Path
    reference: Path


@dataclass(frozen=True)
class Pairing:
    """What two folders, or two files, have in common.

    Attributes:
        pairs: files that are in both, by name.
        unmatched: paths of images and videos that are only in one of them.
    """

    pairs: tuple[FilePair, ...]
    unmatched: tuple[Path, ...]


def pair_files(result: Path, reference: Path) -> Pairing:
    """Pair two files, or the images and videos of the same name in two folders."""
    for path in (result, reference):
        if not path.exists():
            raise ValueError(f"{str(path)!r} does not exist")
    if result.is_dir() != reference.is_dir():
        raise ValueError(f"{str(result)!r} and {str(reference)!r}: pass two files or two folders")
    if not result.is_dir():
        return Pairing((FilePair(result.name, result, reference),), ())
    a, b = (media_files(folder) for folder in (result, reference))
    pairs = tuple(FilePair(name, a[name], b[name]) for name in a if name in b)
    if not pairs:
        raise ValueError(
            f"{str(result)!r} and {str(reference)!r} have no image or video of the same name"
        )
    unmatched = [a[name] for name in a if name not in b] + [b[name] for name in b if name not in a]
    return Pairing(pairs, tuple(unmatched))


def media_files(folder: Path) -> dict[str, Path]:
    """The images and videos below a folder by relative path, sorted; hidden ones are left out."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGES | VIDEOS)
    shown = (path for path in sorted(found) if not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path for path in shown if path.is_file()}


def is_video(path: Path) -> bool:
    """Whether a file is read as a video, by its name."""
    return path.suffix.lower() in VIDEOS


def read_media(path: Path) -> Tensor:
    """Read an image or a video, float32."""
    suffix = path.suffix.lower()
    if suffix not in IMAGES | VIDEOS:
        raise ValueError(f"{str(path)!r} is not an image or a video of a known format")
    from PIL.Image import DecompressionBombError

    try:
        if suffix == ".gif":
            return torch.stack(list(_pillow_frames(path)))
        return _video_frames(path) if is_video(path) else next(_pillow_frames(path))
    except (OSError, SyntaxError, RuntimeError, IndexError, DecompressionBombError) as cause:
        if isinstance(cause, FileNotFoundError):
            raise
        raise ValueError(f"{str(path)!r} cannot be read: {cause}") from cause


def lossy_codec(path: Path) -> str | None:
    """The codec of a video that does not keep every pixel; None for others, and for images.

    A codec that may be lossless counts as that if it keeps RGB: without loss there is no reason to
    convert it to another colour space and back.
    """
    if not is_video(path) or path.suffix.lower() == ".gif":
        return None
    from imageio import v3

    facts: Any = v3.immeta(path, plugin="FFMPEG")
    codec, pixels = str(facts.get("codec")), str(facts.get("pix_fmt"))
    return None if codec in LOSSLESS or pixels.startswith(("gbr", "rgb", "bgr")) else codec


def _pillow_frames(path: Path) -> Iterator[Tensor]:
    from PIL import Image, ImageSequence

    with Image.open(path) as file:
        count = getattr(file, "n_frames", 1)
        if count > 1 and not is_video(path):
            raise ValueError(
                f"{str(path)!r} holds {count} images: write the frames to a GIF or a video"
            )
        for image in ImageSequence.Iterator(file):
            if image.mode not in EIGHT_BIT:
                raise ValueError(f"{str(path)!r} has pixels of {image.mode}, not of 8 bits")
            yield to_pixels(image)


def _video_frames(path: Path) -> Tensor:
    if find_spec("imageio_ffmpeg") is None or find_spec("imageio") is None:
        raise ValueError("to read videos, install two packages: pip install imageio imageio-ffmpeg")
    from imageio import v3

    return to_pixels(v3.imread(path, plugin="FFMPEG"))
