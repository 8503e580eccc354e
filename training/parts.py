"""What the parts of every bundled model have in common.

A transformer that can be compiled, and captions that can be dropped.
Knows neither an architecture nor the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CompiledParts"]


class CompiledParts:
    """Modules, among them a transformer that is compiled for training only."""

    modules: nn.ModuleDict
    compiled: Callable[..., Any] | None = None

    def compile(self) -> None:
        """Compile the transformer for training; sampling goes on without."""
        self.compiled = torch.compile(self.modules["transformer"])

    def drop(
        self, dropped: Tensor, ids: tuple[Tensor, ...], empty: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """What the text encoders take where captions are dropped: an empty prompt."""
        return tuple(torch.where(dropped[:, None], e, i) for e, i in zip(empty, ids, strict=True))

    @property
    def transformer(self) -> Callable[..., Any]:
        """The transformer to call: the compiled one while gradients are wanted."""
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled
        return self.modules["transformer"]
