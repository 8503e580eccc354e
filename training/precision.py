"""Faster training on processors that multiply bfloat16: the products of linear layers only.

Weights, gradients, attention, norms and the residual stream stay in float32. So do noise levels:
`torch.autocast` would round them, and a network would never see what lies between. On the CPU its
attention is also slower than that of float32. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["HalfProducts"]


class HalfProducts(TorchFunctionMode):
    """A context in which linear layers multiply in bfloat16 and return float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, linear layers with rounded arguments."""
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        rounded = (a.bfloat16() if isinstance(a, Tensor) else a for a in args)
        return func(*rounded, **(kwargs or {})).float()
