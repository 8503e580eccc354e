"""Results on disk: the names of their files, the files, and two results side by side.

A picture has shape (3, height, width), a video (frames, 3, height, width), values from 0 to 1.
Knows no pipeline.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Target", "beside", "check_video_writer", "find_target", "slug", "write"]

FPS = 16
MAX_SLUG = 40  # characters
_FOREIGN = {".avi", ".bmp", ".gif", ".jpeg", ".jpg", ".mkv", ".mov", ".tif", ".webm", ".webp"}


@dataclass(frozen=True)
class Target:
    """Where results go: one file, or a folder with a file for each of them.

    Attributes:
        path: the file or the folder.
        suffix: ``".png"`` for pictures, ``".mp4"`` for videos.
        single: whether ``path`` is the file itself.
    """

    path: Path
    suffix: str
    single: bool

    def name(self, index: int, seed: int, prompt: str, *, kind: str = "") -> Path:
        """The file of one result, the same for the same place, seed and prompt.

        Example:
            >>> Target(Path("out"), ".png", single=False).name(0, 7, "A red apple!").as_posix()
            'out/000-seed7-a-red-apple.png'
        """
        tail = f"-{kind}" if kind else ""
        if self.single:
            return self.path.with_name(f"{self.path.stem}{tail}{self.suffix}")
        return self.path / f"{index:03d}-seed{seed}-{slug(prompt)}{tail}{self.suffix}"


def find_target(path: Path, *, results: int, video: bool) -> Target:
    """Where to write, or a ``ValueError`` if that is no place for so many results of this kind."""
    suffix, what = (".mp4", "videos") if video else (".png", "pictures")
    found = path.suffix.lower()
    if path.is_dir() or found not in {".png", ".mp4", *_FOREIGN}:
        if path.exists() and not path.is_dir():
            raise ValueError(f"cannot write into {str(path)!r}: it is not a folder")
        return Target(path, suffix, single=False)
    if found != suffix:
        raise ValueError(f"{what} are written as {suffix} files, not {path.name!r}")
    if results > 1:
        raise ValueError(f"{results} {what} do not go into one file: give a folder, not {path!s}")
    return Target(path, suffix, single=True)


def slug(text: str) -> str:
    """The beginning of a text as a safe file name.

    Example:
        >>> slug("../Crème brûlée, please"), slug("猫")
        ('creme-brulee-please', 'prompt')
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:MAX_SLUG].strip("-") or "prompt"


def beside(full: Tensor, accelerated: Tensor) -> Tensor:
    """The full result, the accelerated one, and eight times their difference, in a row."""
    import torch

    from ertacache.pictures import difference

    return torch.cat([full, accelerated, difference(accelerated, full)], dim=-1)


def check_video_writer() -> Any:
    """Return the video writer, or raise with the name of what has to be installed."""
    try:
        import_module("imageio_ffmpeg")
        from imageio import v3
    except ImportError as cause:
        raise ValueError(
            "to write videos, install two packages: pip install imageio imageio-ffmpeg"
        ) from cause
    return v3


def write(result: Tensor, path: Path, *, fps: int = FPS) -> None:
    """Write a picture as PNG or a video as MP4; makes the folder."""
    import torch

    from ertacache.pictures import to_picture

    result = result.nan_to_num()
    path.parent.mkdir(parents=True, exist_ok=True)
    if result.ndim == 3:
        to_picture(result).save(path)
        return
    frames = (result.clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1).numpy()
    check_video_writer().imwrite(
        path, frames, plugin="FFMPEG", fps=fps, codec="libx264", quality=9, macro_block_size=2
    )
