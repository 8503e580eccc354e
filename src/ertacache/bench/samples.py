"""What the first prompts look like by each method, kept beside the results for the report.

Pixels as bytes in one safetensors file. Knows no method.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["SAMPLES", "Samples", "read_samples"]

SAMPLES = 4  # prompts that are kept


class Samples:
    """Results by method and budget, gathered, then saved at once."""

    def __init__(self, path: Path) -> None:
        """Go on with the samples of an interrupted benchmark, if there are any."""
        self._path = path
        self._kept: dict[str, Tensor] = load_file(path) if path.exists() else {}

    def add(self, method: str, budget: float, result: Tensor) -> None:
        """Keep the first results of a batch, values from 0 to 1."""
        levels = (result[:SAMPLES].clamp(0, 1) * 255).round().to(torch.uint8)
        self._kept[_key(method, budget)] = levels.contiguous()

    def save(self, prompts: Sequence[str]) -> None:
        """Write the file."""
        shown = json.dumps(list(prompts[:SAMPLES]))
        save_file(self._kept, self._path, metadata={"prompts": shown})


def _key(method: str, budget: float) -> str:
    return f"{budget:g}|{method}"


def read_samples(path: Path) -> tuple[list[str], dict[tuple[str, float], Tensor]]:
    """The prompts, and bytes of shape (prompts, ..., 3, height, width) by method and budget."""
    with safe_open(path, "pt") as file:
        prompts = json.loads(file.metadata()["prompts"])
    found = {}
    for key, value in load_file(path).items():
        budget, method = key.split("|", 1)
        found[method, float(budget)] = value
    return prompts, found
