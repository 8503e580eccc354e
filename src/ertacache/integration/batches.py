"""Run a pipeline's network in micro-batches, and know which network ran last.

For calibration, where all prompts go through one call of the pipeline: the pipeline holds their
latents, the network sees a few at a time. Rows of a batch do not know of each other, so the results
are those of one call up to rounding. Knows no policy and no scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.integration.compat import Pipeline
from ertacache.integration.fingerprints import find_denoisers

__all__ = ["MicroBatches", "micro_batches"]

# Tables of positions that all samples share: their length may happen to be the batch's.
SHARED = frozenset({"img_ids", "txt_ids", "image_rotary_emb", "rotary_emb", "freqs_cis"})


class MicroBatches:
    """What a pipeline's networks are called with while ``micro_batches`` is in force.

    Attributes:
        owner: the network that was called last; None before the first call.
    """

    def __init__(self, size: int | None, prompts: int) -> None:
        """Let the network see ``size`` of ``prompts`` prompts at a time; None is all of them."""
        if size is not None and size < 1:
            raise ValueError(f"batch_size must be at least 1, got {size}")
        self.owner: nn.Module | None = None
        self._size, self._prompts = size, prompts

    def forward(self, module: nn.Module, below: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Stand in for ``module.forward``; ``below`` is what it was before."""
        self.owner = module
        arguments = _named(module, args, kw)
        rows = _batch(arguments)
        # Guidance that shares a call with the prompts brings several rows per prompt.
        size = rows if self._size is None else self._size * max(1, rows // self._prompts)
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


@contextmanager
def micro_batches(pipe: Pipeline, size: int | None, *, prompts: int) -> Iterator[MicroBatches]:
    """Let the networks of a pipeline see at most ``size`` prompts at a time.

    Attach a policy inside of it, not around it: what a policy reuses must not be split again.

    Args:
        pipe: the pipeline, nothing attached.
        size: prompts per call of the network; None leaves the calls whole.
        prompts: prompts per call of the pipeline.
    """
    state = MicroBatches(size, prompts)
    with ExitStack() as undo:
        for module in find_denoisers(pipe).values():
            _place(module, state, undo)
        yield state


def _place(module: nn.Module, state: MicroBatches, undo: ExitStack) -> None:
    before, below = vars(module).get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return state.forward(module, below, *args, **kwargs)

    # Whoever removes hooks later follows the chain of wrapped functions.
    forward.__wrapped__ = below  # type: ignore[attr-defined]
    object.__setattr__(module, "forward", forward)

    def restore() -> None:
        if vars(module).get("forward") is not forward:
            return  # offloading has put its own back already
        vars(module).pop("forward")
        if before is not None:
            object.__setattr__(module, "forward", before)

    undo.callback(restore)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def _batch(arguments: Mapping[str, Any]) -> int:
    """Rows of the latent, which every network of diffusers takes first or by one of two names."""
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
