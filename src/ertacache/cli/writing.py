"""Files that the commands write: where they may go, their names, images and videos.

An image has shape (3, height, width), a video (frames, 3, height, width), values from 0 to 1.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ertacache.cli.group import Interrupted, processes_of
from ertacache.cli.output import STDOUT
from ertacache.distributed import launched_number
from ertacache.formats.files import draft, write_whole

if TYPE_CHECKING:
    from os import PathLike

    from PIL.Image import Image
    from torch import Tensor

    from ertacache.formats.parts import Parts
    from ertacache.formats.policy import Policy

__all__ = [
    "Destination",
    "Output",
    "check_folder",
    "check_json",
    "check_name",
    "find_destination",
    "finite",
    "keeping_runs",
    "open_output",
    "parts_of",
    "side_by_side",
    "slug",
    "write",
    "write_image",
    "write_json",
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


def check_name(path: Path, *suffixes: str) -> None:
    """Raise unless a file to write is no folder, and has one of the suffixes.

    Example:
        >>> check_name(Path("page.pdf"), ".html")
        Traceback (most recent call last):
        ValueError: cannot write 'page.pdf': call it page.html
    """
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {str(path)!r}: call it {path.with_suffix(suffixes[0])}")


def check_json(path: Path | None) -> None:
    """Raise before any work unless the file of ``--json`` can be written, if there is one."""
    if path is not None and path != STDOUT:
        check_name(path, ".json")
        check_folder(path)


def finite(value: float | None) -> float | None:
    """A number as JSON has it: the PSNR of identical results, which is infinite, is null."""
    return value if value is not None and isfinite(value) else None


def write_json(path: Path | None, content: object) -> None:
    """Write the values of a command for machines: to a file, to standard output, or not at all.

    Of several processes the main one does.
    """
    if launched_number() > 0:
        return
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if path == STDOUT:
        print(text, end="", flush=True)
    elif path is not None:
        write_whole(path, text)


@dataclass(frozen=True, eq=False)
class Output:
    """The file of a policy that a command writes.

    Attributes:
        path: the file.
        old: the policy that is there; None if there is none.
        force: overwrite measured work.
        writes: whether this process writes it; of several, the main one does.
    """

    path: Path
    old: Policy | None = None
    force: bool = False
    writes: bool = True

    def check(self, new: Policy | None) -> None:
        """Raise if measured work would be lost with ``new`` there; None keeps nothing of it."""
        from ertacache.formats.measured import lost_work

        lost = "" if self.old is None or self.force else lost_work(self.old, new)
        if lost:
            raise ValueError(
                f"{str(self.path)!r} holds {lost}, which would be lost: give another file to "
                "write, or --force"
            )

    def save(self, policy: Policy) -> None:
        """Write the policy, unless measured work would be lost."""
        self.check(policy)
        if self.writes:
            policy.save(self.path)


def open_output(context: typer.Context, path: Path, *, force: bool = False) -> Output:
    """Lock the file of a policy until the command ends, and read what is there.

    Of several processes the main one does.

    Raises:
        ValueError: it cannot be written, another process is writing it, or a file of another kind
            would be lost.
    """
    from ertacache.formats.lock import locked
    from ertacache.formats.policy import Policy, PolicyError

    if not processes_of(context).is_main:
        return Output(path, writes=False)
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    check_folder(path)
    context.with_resource(locked(path))
    try:
        return Output(path, Policy.load(path) if path.exists() else None, force)
    except PolicyError as cause:
        raise ValueError(
            f"will not overwrite {str(path)!r}, which is not a whole policy; "
            f"give another file to write ({cause})"
        ) from cause


@contextmanager
def keeping_runs(*paths: str | PathLike[str] | None) -> Iterator[None]:
    """Report, if the command is interrupted, where the runs are that it has finished."""
    try:
        yield
    except KeyboardInterrupt as error:
        found = [os.fspath(path) for path in paths if path is not None and os.path.exists(path)]
        if not found:
            raise Interrupted("nothing was written") from error
        left = (
            f"the runs so far are in {' and '.join(found)}; the same command continues from there"
        )
        raise Interrupted(left) from error


def parts_of(output: Path) -> Parts:
    """What keeps the finished runs of a command until its output is written."""
    from ertacache.formats.parts import Parts

    return Parts(output.with_name(f"{output.name}.parts"), lasting=True)


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
        _check_place(path)
        return Destination(path, suffix, single=False)
    if found != suffix:
        raise ValueError(f"{what} are written as {suffix} files, not {path.name!r}")
    if results > 1:
        raise ValueError(f"{results} {what} do not go into one file: give a folder, not {path!s}")
    _check_place(path.parent)
    return Destination(path, suffix, single=True)


def _check_place(folder: Path) -> None:
    """Raise unless a folder can be written to, or made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"cannot write into {str(folder)!r}: {str(there)!r} is not a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(
            f"cannot write into {str(folder)!r}: the folder {str(there)!r} cannot be written to"
        )


def slug(text: str) -> str:
    """The beginning of a string as a safe file name.

    Example:
        >>> slug("../Crème brûlée, please"), slug("猫")
        ('creme-brulee-please', 'prompt')
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:MAX_SLUG].strip("-") or "prompt"


def side_by_side(full: Tensor, accelerated: Tensor) -> Tensor:
    """The full result, the accelerated one, and eight times their difference, each labelled."""
    from ertacache.report.grids import difference, labelled_row

    return labelled_row(
        [
            ("full run", full),
            ("accelerated", accelerated),
            ("difference x8", difference(accelerated, full)),
        ]
    )


def write(result: Tensor, path: Path, *, fps: int = FPS, lossless: bool = False) -> None:
    """Write an image as PNG or a video as MP4, whole or not at all; makes the folder.

    Args:
        result: the image or video.
        path: the file.
        fps: frames per second of a video.
        lossless: keep the 8-bit levels of a video; those of an image are always kept.
    """
    from ertacache.metrics.encoding import LOSSLESS, LOSSY, encode_video
    from ertacache.metrics.image import to_image

    result = result.nan_to_num()
    path.parent.mkdir(parents=True, exist_ok=True)
    if result.ndim == 3:
        write_image(to_image(result), path)
    else:
        with draft(path) as made:
            encode_video(result, made, fps=fps, codec=LOSSLESS if lossless else LOSSY)


def write_image(image: Image, path: Path) -> None:
    """Write an image as PNG, whole or not at all."""
    data = BytesIO()  # not the file: Pillow hides why the system could not write
    image.save(data, format="PNG")
    write_whole(path, data.getvalue())
