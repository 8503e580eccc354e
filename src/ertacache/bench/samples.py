"""What each method generated, stored beside the results for the report and for FID.

Pixels as bytes in one safetensors file. Of videos only the first prompts are stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from ertacache.formats.files import write_whole
from ertacache.metrics.image import to_levels

__all__ = ["SAMPLES", "Samples", "read_samples"]

SAMPLES = 4  # prompts that the report shows


class Samples:
    """Results by method, budget and batch, on disk batch by batch."""

    def __init__(self, path: Path, *, every: bool = False) -> None:
        """Open the samples of an interrupted benchmark, if there are any.

        Args:
            path: the file.
            every: keep all images, as FID needs them, in place of the first that are shown.

        Raises:
            ValueError: the file is damaged, or of another kind.
        """
        self._path, self._every, self._fresh = path, every, False
        with _readable(path):
            self._kept: dict[str, Tensor] = load_file(path) if path.exists() else {}

    def add(self, method: str, budget: float, result: Tensor, *, batch: int = 0) -> None:
        """Add the results of a batch, values from 0 to 1."""
        if result.ndim == 5 or not self._every:
            if batch > 0:
                return
            result = result[:SAMPLES]
        self._kept[_key(method, budget, batch)] = to_levels(result).contiguous()
        self._fresh = True

    def has(self, method: str, budget: float, *, batch: int) -> bool:
        """Whether all is there that is kept of a batch."""
        first = self._kept.get(_key(method, budget, 0))
        if batch > 0 and (not self._every or (first is not None and first.ndim == 5)):
            return True
        return _key(method, budget, batch) in self._kept

    def pack(self, batches: Sequence[int]) -> bytes:
        """The results of some batches as bytes, for another process; empty if none is new."""
        numbers = {str(batch) for batch in batches}
        if not self._fresh:
            return b""
        return save({k: v for k, v in self._kept.items() if k.split("|")[1] in numbers})

    def unpack(self, data: bytes) -> None:
        """Add what another process has packed, if it has anything."""
        self._kept |= load(data) if data else {}
        self._fresh |= bool(data)

    def save(self, prompts: Sequence[str]) -> None:
        """Write the file, if there is anything new; ``prompts`` are those of the first batch."""
        if not self._fresh:
            return
        shown = json.dumps(list(prompts[:SAMPLES]))
        write_whole(self._path, save(self._kept, metadata={"prompts": shown}))
        self._fresh = False

    def images(self, method: str, budget: float, batches: int) -> Tensor | None:
        """All images of a method, from 0 to 1; None for videos, or if a batch is missing."""
        keys = [_key(method, budget, batch) for batch in range(batches)]
        if not all(key in self._kept and self._kept[key].ndim == 4 for key in keys):
            return None
        return torch.cat([self._kept[key] for key in keys]).float() / 255


def _key(method: str, budget: float, batch: int) -> str:
    return f"{budget:g}|{batch}|{method}"


def read_samples(path: Path) -> tuple[list[str], dict[tuple[str, float], Tensor]]:
    """The first prompts, and bytes of shape (prompts, ..., 3, height, width) by method, budget.

    Raises:
        ValueError: the file is damaged, or of another kind.
    """
    with _readable(path), safe_open(path, "pt") as file:
        prompts = [str(prompt) for prompt in json.loads(file.metadata()["prompts"])]
        found = {}
        for key in file.keys():  # noqa: SIM118  (not a dictionary)
            budget, batch, method = key.split("|", 2)
            if batch == "0":
                found[method, float(budget)] = _checked(file.get_tensor(key)[:SAMPLES])
    return prompts, found


def _checked(levels: Tensor) -> Tensor:
    """Images or videos as bytes, and nothing else."""
    if levels.dtype != torch.uint8 or levels.ndim not in (4, 5) or levels.shape[-3] != 3:
        raise ValueError(f"no image and no video: {levels.dtype}, {tuple(levels.shape)}")
    return levels


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Report whatever is wrong with a file of samples, and the remedy."""
    try:
        yield
    except (SafetensorError, ValueError, TypeError, KeyError) as cause:
        raise ValueError(
            f"{str(path)!r} does not hold the samples of a benchmark: delete it ({cause})"
        ) from cause
