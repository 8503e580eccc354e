"""What the app takes: a request for one image or video, its limits, and files to open.

Everything that comes from a browser is checked here, before a model is touched. Loads no torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

from ertacache.formats.text import one_line

__all__ = [
    "Limits",
    "Request",
    "check_prompts",
    "check_upload",
    "describe_failure",
    "find_models",
    "find_policies",
    "free_name",
]

_INDEX = "model_index.json"


@dataclass(frozen=True)
class Limits:
    """What one job may take at most.

    Attributes:
        side: height and width in pixels.
        steps: sampling steps.
        frames: frames of a video.
        prompt: characters of a prompt.
        prompts: prompts of a calibration.
        upload: bytes of a policy file.
    """

    side: int = 1024
    steps: int = 200
    frames: int = 129
    prompt: int = 2000
    prompts: int = 64
    upload: int = 64 << 20


@dataclass(frozen=True)
class Request:
    """One image or video, in full and accelerated.

    Attributes:
        prompt: what to generate.
        seed: seed of the noise.
        steps: sampling steps of the full run.
        height: in pixels.
        width: in pixels.
        frames: frames of a video; None for an image.
        speedup: at least this many times fewer computed steps.
    """

    prompt: str
    seed: int
    steps: int
    height: int
    width: int
    frames: int | None = None
    speedup: float = 2.0

    def check(self, limits: Limits) -> Request:
        """The request with whole numbers; raise if one is missing or out of range.

        Example:
            >>> Request("a cat", 0, 30.0, 64, 64).check(Limits()).steps
            30
            >>> Request("a cat", 0, 30, 64, 4096).check(Limits())
            Traceback (most recent call last):
            ValueError: width must be a whole number from 8 to 1024, got 4096
        """
        check_prompt(self.prompt, limits)
        ranges = {
            "seed": (0, (1 << 53) - 1),  # what a browser can count to
            "steps": (2, limits.steps),
            "height": (8, limits.side),
            "width": (8, limits.side),
            "frames": (1, limits.frames),
        }
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, (low, high) in ranges.items():
            if name != "frames" or self.frames is not None:
                values[name] = _whole(name, values[name], low, high)
        if not isinstance(self.speedup, int | float) or not 1 <= self.speedup < math.inf:
            raise ValueError(f"the speed-up must be a number of at least 1, got {self.speedup}")
        return Request(**values)


def _whole(name: str, value: object, low: int, high: int) -> int:
    whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    if not whole or not low <= value <= high:  # type: ignore[operator]
        shown = "nothing" if value is None else value
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {shown}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_prompt(prompt: object, limits: Limits) -> str:
    """The prompt without spaces around it; raise if it is empty or too long."""
    text = prompt.strip() if isinstance(prompt, str) else ""
    if not text:
        raise ValueError("the prompt is empty: write what to generate")
    if len(text) > limits.prompt:
        raise ValueError(f"the prompt has {len(text)} characters, more than {limits.prompt}")
    return text


def check_prompts(text: str, limits: Limits) -> list[str]:
    r"""The prompts of a calibration, one per line.

    Example:
        >>> check_prompts("a cat\n\n a dog ", Limits())
        ['a cat', 'a dog']
    """
    lines = (text or "").split("\n")
    prompts = [check_prompt(line, limits) for line in lines if line.strip()]
    if len(set(prompts)) < 2:
        raise ValueError("a calibration needs at least two different prompts, one per line")
    if len(prompts) > limits.prompts:
        raise ValueError(f"there are {len(prompts)} prompts, more than {limits.prompts}")
    return prompts


def check_upload(path: Path, limits: Limits) -> Path:
    """A file that was uploaded; raise if it is too large or of another kind."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{path.name!r} is no policy file: its name must end in .safetensors")
    size = path.stat().st_size
    if size > limits.upload:
        raise ValueError(
            f"{path.name!r} has {size / 2**20:.0f} MB, more than the {limits.upload >> 20} MB that "
            "the app opens"
        )
    return path


def find_models(folder: Path) -> dict[str, Path]:
    """The pipelines in a folder by name; links that lead out of it are left out."""
    root, found = folder.resolve(), {}
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        index = (entry / _INDEX).resolve()
        if index.is_file() and index.is_relative_to(root):
            found[entry.name] = entry
    return found


def find_policies(folder: Path, limits: Limits) -> list[Path]:
    """Files in a folder that may be policies, the newest first; without links that lead out."""
    root, found = folder.resolve(), []
    for path in root.glob("*.safetensors"):
        if path.is_file() and path.resolve().is_relative_to(root):
            facts = path.stat()
            if facts.st_size <= limits.upload:
                found.append((-facts.st_mtime, path))
    return [path for _, path in sorted(found)]


def free_name(path: Path) -> Path:
    """A file name that is not taken: the given one, or with a number.

    Example:
        >>> free_name(Path("no-such.file")).name
        'no-such.file'
    """
    found, number = path, 2
    while found.exists() or found.is_symlink():
        found, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return found


def describe_failure(error: BaseException, *hidden: str | os.PathLike[str]) -> str:
    r"""What went wrong on one line, without control characters and without hidden paths.

    Example:
        >>> describe_failure(ValueError("cannot load '/tmp/x/a.file':\n too short"), "/tmp/x")
        "cannot load 'a.file': too short"
    """
    text = str(error) if str(error).strip() else type(error).__name__
    for path in hidden:
        text = text.replace(os.fspath(path) + os.sep, "").replace(os.fspath(path), "")
    return one_line(text)
