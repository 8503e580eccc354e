"""Groups of a latent by explicit filters, one matrix per axis: what ``core.groups`` must equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ertacache.core.groups import Groups


def block_means(latents: Tensor, side: int) -> Tensor:
    """Every pixel of (B, channels, grid ...) as the mean of its block, in float64."""
    latents = latents.double()
    for axis in range(2, latents.ndim):
        block = torch.arange(latents.shape[axis]) // side
        same = (block[:, None] == block).double()
        means = same / same.sum(1, keepdim=True)
        latents = torch.tensordot(latents, means, dims=([axis], [1])).movedim(-1, axis)
    return latents


def group_parts(latents: Tensor, groups: Groups) -> list[Tensor]:
    """Every group of (B, channels, grid ...) by itself, in the order of the coefficients."""
    smooth = [block_means(latents, 2**level) for level in reversed(range(groups.bands))]
    bands = [smooth[0]] + [fine - coarse for coarse, fine in pairwise(smooth)]
    n = latents.shape[1]
    place = torch.tensor([channel * groups.channels // n for channel in range(n)])
    found = []
    for band in bands:
        for group in range(groups.channels):
            inside = (place == group).double().view(1, n, *[1] * (latents.ndim - 2))
            found.append(band * inside)
    return found


def grouped_update(x: Tensor, vectors: Sequence[Tensor], z: Tensor, groups: Groups) -> Tensor:
    """``c x + sum_j a_j v_j`` with ``z`` of shape (groups, 1 + n), all of it unpacked."""
    total = z[0, 0] * x.double()
    for j, vector in enumerate(vectors):
        for group, part in enumerate(group_parts(vector, groups)):
            total = total + z[group, 1 + j] * part
    return total
