"""Muon: a step in the direction of the orthogonalised momentum, for the matrices of a network.

As `torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, but matrices of one shape are
orthogonalised together, and in float32 where the processor does not multiply bfloat16: there its
emulation takes twenty times as long. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from training.precision import multiplies_bfloat16

__all__ = ["Muon", "orthogonalise"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, steepest at zero
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push all singular values of some matrices to about one, shape (count, rows, columns)."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(torch.bfloat16 if multiplies_bfloat16() else torch.float32)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, at a learning rate in those of AdamW."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        """Take matrices only."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes[matrix.shape].append(matrix)
            for matrices in shapes.values():
                self._step_of_one_shape(matrices, group)

    def _step_of_one_shape(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        gradients, momentum = [m.grad for m in matrices], group["momentum"]
        for matrix in matrices:
            self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        buffers = [self.state[m]["momentum_buffer"] for m in matrices]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        # As large as a step of AdamW, whose root mean square is about 0.2.
        scale = 0.2 * math.sqrt(max(matrices[0].shape)) * group["lr"]
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(matrices, list(orthogonalise(torch.stack(ahead)).mul_(scale)))
