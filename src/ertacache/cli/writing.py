"""Files that the commands write: where they may go, their names, images and videos.

An image has shape (3, height, width), a video (frames, 3, height, width), values from 0 to 1.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ertacache.cli.group import Interrupted

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Destination",
    "check_folder",
    "check_output",
    "check_video_writer",
    "find_destination",
    "keeping_profile",
    "side_by_side",
    "slug",
    "write",
]

FPS = 16
MAX_SLUG = 40  # characters
_FOREIGN = {".avi", ".bmp", ".gif", ".jpeg", ".jpg", ".mkv", ".mov", ".tif", ".webm", ".webp"}


def check_folder(path: Path) -> None:
    """Raise unless the folder of a file exists and can be written to."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {str(path)!r}: the folder cannot be written to")


def check_output(path: Path) -> None:
    """Raise unless a policy can be written here without losing a file of another kind."""
    from ertacache.formats.policy import Policy, PolicyError

    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    check_folder(path)
    if path.exists():
        try:
            Policy.load(path)
        except PolicyError as cause:
            raise ValueError(
                f"will not overwrite {str(path)!r}, which is not a whole policy; "
                f"give another file to write ({cause})"
            ) from cause


@contextmanager
def keeping_profile(path: Path | None) -> Iterator[None]:
    """Report, if the command is interrupted, what is left of the profile that it was writing."""
    try:
        yield
    except KeyboardInterrupt as error:
        if path is None or not path.exists():
            raise Interrupted("nothing was written") from error
        left = f"the runs so far are in {path}; the same command continues from there"
        raise Interrupted(left) from error


@dataclass(frozen=True)
class Destination:
    """Where results go: one file, or a folder with a file for each of them.

    Attributes:
        path: the file or the folder.
        suffix: ``".png"`` for images, ``".mp4"`` for videos.
        single: whether ``path`` is the file itself.
    """

    path: Path
    suffix: str
    single: bool

    def name(self, index: int, seed: int, prompt: str, *, kind: str = "") -> Path:
        """The file of one result, given by its index, seed and prompt.

        Example:
            >>> Destination(Path("out"), ".png", single=False).name(0, 7, "A red apple!").as_posix()
            'out/000-seed7-a-red-apple.png'
        """
        tail = f"-{kind}" if kind else ""
        if self.single:
            return self.path.with_name(f"{self.path.stem}{tail}{self.suffix}")
        return self.path / f"{index:03d}-seed{seed}-{slug(prompt)}{tail}{self.suffix}"


def find_destination(path: Path, *, results: int, video: bool) -> Destination:
    """Where to write; a ``ValueError`` if so many results of this kind cannot go there."""
    suffix, what = (".mp4", "videos") if video else (".png", "images")
    found = path.suffix.lower()
    if path.is_dir() or found not in {".png", ".mp4", *_FOREIGN}:
        if path.exists() and not path.is_dir():
            raise ValueError(f"cannot write into {str(path)!r}: it is not a folder")
        return Destination(path, suffix, single=False)
    if found != suffix:
        raise ValueError(f"{what} are written as {suffix} files, not {path.name!r}")
    if results > 1:
        raise ValueError(f"{results} {what} do not go into one file: give a folder, not {path!s}")
    return Destination(path, suffix, single=True)


def slug(text: str) -> str:
    """The beginning of a string as a safe file name.

    Example:
        >>> slug("../Crème brûlée, please"), slug("猫")
        ('creme-brulee-please', 'prompt')
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:MAX_SLUG].strip("-") or "prompt"


def side_by_side(full: Tensor, accelerated: Tensor) -> Tensor:
    """The full result, the accelerated one, and eight times their difference, in a row."""
    import torch

    from ertacache.report.grids import difference

    return torch.cat([full, accelerated, difference(accelerated, full)], dim=-1)


def check_video_writer() -> Any:
    """Return the video writer, or raise with what has to be installed."""
    try:
        import_module("imageio_ffmpeg")
        from imageio import v3
    except ImportError as cause:
        raise ValueError(
            "to write videos, install two packages: pip install imageio imageio-ffmpeg"
        ) from cause
    return v3


def write(result: Tensor, path: Path, *, fps: int = FPS) -> None:
    """Write an image as PNG or a video as MP4; makes the folder."""
    import torch

    from ertacache.metrics.image import to_image

    result = result.nan_to_num()
    path.parent.mkdir(parents=True, exist_ok=True)
    if result.ndim == 3:
        to_image(result).save(path)
        return
    frames = (result.clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1).numpy()
    check_video_writer().imwrite(
        path, frames, plugin="FFMPEG", fps=fps, codec="libx264", quality=9, macro_block_size=2
    )
