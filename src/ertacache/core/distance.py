"""How far the latents of a run are from those of the full run, over prompts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["distances", "robust_distance", "typical_distance"]


def distances(reached: Tensor, target: Tensor) -> Tensor:
    """Root mean square distance of every prompt, shape (P,), float64, on the CPU.

    Args:
        reached: latents, shape (P, ...).
        target: what they should be, of the same shape.

    Example:
        >>> distances(torch.tensor([[3.0, 3.0], [0.0, 1.0]]), torch.zeros(2, 2))
        tensor([3.0000, 0.7071], dtype=torch.float64)
    """
    squares = (reached.double() - target.to(reached.device).double()).square()
    return squares.flatten(1).mean(1).sqrt().cpu()


def typical_distance(found: Tensor) -> float:
    """Geometric mean over prompts of their distances, as a mean of PSNRs takes it.

    An arithmetic mean would be dominated by the one prompt that diverges the most.

    Example:
        >>> round(typical_distance(torch.tensor([1.0, 100.0])), 6)
        10.0
    """
    return float(_logarithms(found).mean().exp())


def robust_distance(found: Tensor) -> float:
    """Geometric mean of the typical distance and that of the worst tenth of the prompts.

    What candidates are compared by: the mean alone would accept a plan under which a few prompts
    diverge.

    Example:
        >>> round(robust_distance(torch.tensor([1.0, 1.0, 1.0, 16.0])), 6)
        5.656854
    """
    logs = _logarithms(found)
    worst = logs.topk(max(1, math.ceil(len(logs) / 10))).values
    return float(((logs.mean() + worst.mean()) / 2).exp())


def _logarithms(found: Tensor) -> Tensor:
    return found.double().clamp_min(torch.finfo(torch.float64).tiny).log()
