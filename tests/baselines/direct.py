"""A cache of diffusers, used as its documentation says: the other side of the comparison."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.baselines.cases import CASES, build, run

_FRESH: dict[str, Any] = {}


def directly(name: str, config: Any, **changes: Any) -> Tensor:
    """The result of a fresh copy of a pipeline on which nothing of ours ever was."""
    if name not in _FRESH:
        _FRESH[name] = build(name)
    pipe = _FRESH[name]
    pipe.transformer.enable_cache(config(pipe))
    try:
        return run(pipe, CASES[name], **changes)
    finally:
        pipe.transformer._reset_stateful_cache()
        pipe.transformer.disable_cache()
