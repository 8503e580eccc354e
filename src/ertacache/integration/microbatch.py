"""Run a network in micro-batches: the pipeline holds all prompts, the network sees a few at a time.

For calibration, where all prompts go through one call of the pipeline. Samples of a batch do not
influence each other, so the results are those of one call up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MicroBatch"]

# Positions that all samples share: their length may happen to be the batch's.
SHARED = frozenset({"img_ids", "txt_ids", "image_rotary_emb", "rotary_emb", "freqs_cis"})


@dataclass(frozen=True)
class MicroBatch:
    """How calls of a network are split.

    Attributes:
        size: prompts per call of the network.
        prompts: prompts per call of the pipeline.
    """

    size: int
    prompts: int

    def __post_init__(self) -> None:
        """Check the range."""
        if self.size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.size}")

    def forward(self, module: nn.Module, below: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Call ``below``, the forward of ``module``, on parts of the batch and join the outputs."""
        arguments = _named(module, args, kw)
        rows = _batch(arguments)
        # Guidance that shares a call with the prompts brings several rows per prompt.
        size = self.size * max(1, rows // self.prompts)
        if size >= rows:
            return below(*args, **kw)
        parts = []
        for start in range(0, rows, size):
            place = slice(start, min(start + size, rows))
            part = {
                name: value if name in SHARED else _take(value, rows, place)
                for name, value in arguments.items()
            }
            parts.append(below(**part))
        return _join(parts)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def _batch(arguments: Mapping[str, Any]) -> int:
    """Rows of the latent, the first argument of every network, or one with one of two names."""
    names = ("hidden_states", "sample", *arguments)
    latent = next(arguments[name] for name in names if isinstance(arguments.get(name), Tensor))
    return len(latent)


def _take(value: Any, rows: int, place: slice) -> Any:
    """Some rows of whatever has as many rows as the batch; all else as it is."""
    if isinstance(value, Tensor):
        return value[place] if value.ndim > 0 and len(value) == rows else value
    if isinstance(value, dict):
        return {
            name: entry if name in SHARED else _take(entry, rows, place)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_take(entry, rows, place) for entry in value)
    return value


def _join(parts: list[Any]) -> Any:
    """The outputs of a network on the parts of a batch, as one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):  # also diffusers' output classes
        return type(first)(**{name: _join([part[name] for part in parts]) for name in first})
    if isinstance(first, list | tuple):
        return type(first)(_join(list(entries)) for entries in zip(*parts, strict=True))
    return first
