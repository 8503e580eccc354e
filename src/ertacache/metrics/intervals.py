"""How sure a mean is: bootstrap intervals. Knows no metric."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["bootstrap_interval"]

RESAMPLES = 2000


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """The central share of the means of resampled values, the same for the same values.

    Args:
        values: one per prompt or file.
        level: the share of the means between the two ends.
        seed: of the resampling.

    Example:
        >>> bootstrap_interval([2.0, 2.0, 2.0])
        (2.0, 2.0)
    """
    if not values:
        raise ValueError("there is no value to resample")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    generator = torch.Generator().manual_seed(seed)
    data = torch.tensor(list(values), dtype=torch.float64)
    places = torch.randint(len(data), (RESAMPLES, len(data)), generator=generator)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = data[places].mean(1).quantile(tails).tolist()
    return low, high
