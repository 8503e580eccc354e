"""Faster arithmetic for training on a processor: bfloat16 where it helps, and a cheaper GELU.

Only the products of linear layers are rounded, and only on processors that multiply bfloat16.
Weights, gradients, attention, norms and the residual stream stay in float32. So do noise levels:
`torch.autocast` would round them, and a network would never see what lies between. On the CPU its
attention is also slower than that of float32. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FastArithmetic", "multiplies_bfloat16"]

_SLOPE = 2 * math.sqrt(2 / math.pi)  # (1 + tanh(y)) / 2 is the sigmoid of 2 y


def multiplies_bfloat16() -> bool:
    """Whether this processor does, and does not only emulate it."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


class FastArithmetic(TorchFunctionMode):
    """A context in which linear layers may multiply in bfloat16, and GELU has no tanh."""

    def __init__(self, *, half: bool) -> None:
        """Choose whether linear layers multiply in bfloat16; they return float32."""
        super().__init__()
        self.half = half

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or its faster equal."""
        kwargs = kwargs or {}
        if func is F.gelu and kwargs.get("approximate") == "tanh":
            x = args[0]
            return x * torch.sigmoid(_SLOPE * x * (1 + 0.044715 * x * x))
        if func is not F.linear or not self.half:
            return func(*args, **kwargs)
        rounded = (a.bfloat16() if isinstance(a, Tensor) else a for a in args)
        return func(*rounded, **kwargs).float()
