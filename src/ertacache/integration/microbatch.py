"""Run a network in micro-batches: the pipeline holds all prompts, the network sees a few at a time.

For calibration, where all prompts go through one call of the pipeline. Samples of a batch do not
influence each other, so the results are those of one call up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
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
        named = _named(module, args)
        rows = _batch(named | kw, args)
        # Guidance that shares a call with the prompts brings several rows per prompt.
        size = self.size * max(1, rows // self.prompts)
        if size >= rows:
            return below(*args, **kw)
        parts = []
        for start in range(0, rows, size):
            place = slice(start, min(start + size, rows))
            names = [*named, *[""] * (len(args) - len(named))]
            given = [_part(n, v, rows, place) for n, v in zip(names, args, strict=True)]
            parts.append(below(*given, **{n: _part(n, v, rows, place) for n, v in kw.items()}))
        return _join(parts)


def _named(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """The positional arguments that have names; those of ``*args`` have none."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    known = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [parameter.name for parameter in takewhile(lambda p: p.kind not in several, known)]
    return dict(zip(names, args, strict=False))


def _batch(named: Mapping[str, Any], args: tuple[Any, ...]) -> int:
    """Rows of the latent: one with one of two names, or the first argument that has rows."""
    latents = (named.get("hidden_states"), named.get("sample"), *args, *named.values())
    found = (value for value in latents if isinstance(value, Tensor) and value.ndim > 0)
    return next((len(value) for value in found), 1)


def _part(name: str, value: Any, rows: int, place: slice) -> Any:
    return value if name in SHARED else _take(value, rows, place)


def _take(value: Any, rows: int, place: slice) -> Any:
    """Some rows of whatever has as many rows as the batch; all else as it is."""
    if isinstance(value, Tensor):
        return value[place] if value.ndim > 0 and len(value) == rows else value
    if isinstance(value, dict):
        return {name: _part(name, entry, rows, place) for name, entry in value.items()}
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
