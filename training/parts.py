"""What the parts of every bundled model have in common: a transformer that can be compiled.

Knows neither an architecture nor the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["CompiledParts"]


class CompiledParts:
    """Modules, among them a transformer that is compiled for training only."""

    modules: nn.ModuleDict
    compiled: Callable[..., Any] | None = None

    def compile(self) -> None:
        """Compile the transformer for training; sampling goes on without."""
        self.compiled = torch.compile(self.modules["transformer"])

    @property
    def transformer(self) -> Callable[..., Any]:
        """The transformer to call: the compiled one while gradients are wanted."""
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled
        return self.modules["transformer"]
