"""Groups: parts of a latent that have coefficients of their own.

A latent is divided into channels, or groups of them, and into bands of spatial and temporal
frequency. The bands are those of a pyramid of pooling filters: P_n is the mean over blocks of n
pixels along every axis of the grid, so that with two levels

    latent = P_4 latent + (P_2 - P_4) latent + (1 - P_2) latent

Blocks of 4 consist of blocks of 2, so the parts are orthogonal: inner products and errors of the
groups add up to those of the latent. All of it is additions and means, in any precision and on any
device. A pixel belongs to the same block whatever the size of the latent, so the coefficients of
groups serve other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ertacache.core.gram import Gram

__all__ = [
    "ONE_GROUP",
    "GroupCombination",
    "GroupStatistics",
    "Groups",
    "Layout",
    "finest_groups",
    "group_products",
    "pool",
    "spread",
]

MAX_CHANNELS = 16
"""Groups of channels, at most: neighbouring ones share coefficients if there are more."""

BANDS = 3  # of a profile
MAX_BANDS = 4
FOLDS = 8
"""Sums of prompts that are kept of statistics by group, so that a file does not grow with them."""

CHUNK = 1 << 22  # elements cast to float64 at a time: bounds memory for any latent


@dataclass(frozen=True)
class Layout:
    """Which axes of a batch of latents are channels and which are the grid.

    Attributes:
        channel: axis of the channels; the others, but for the batch, are the grid.
        grid: size of the grid, if it is flattened to tokens: axis 1 are tokens, axis 2 channels.
        patch: side of the square of pixels that a token packs behind each of its channels.

    Example:
        >>> latents = torch.arange(16.0).view(1, 4, 4)  # four tokens of 2 x 2 pixels, one channel
        >>> Layout(channel=2, grid=(2, 2), patch=2).unpack(latents)[0, 0]
        tensor([[ 0.,  1.,  4.,  5.],
                [ 2.,  3.,  6.,  7.],
                [ 8.,  9., 12., 13.],
                [10., 11., 14., 15.]])
    """

    channel: int = 1
    grid: tuple[int, ...] = ()
    patch: int = 1

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a batch of latents of this shape can have this layout."""
        if not self.grid:
            return 3 <= len(shape) <= 5 and 1 <= self.channel < len(shape)
        return (
            len(shape) == 3
            and shape[1] == math.prod(self.grid)
            and shape[2] % self.patch**2 == 0
            and (self.patch == 1 or len(self.grid) == 2)
        )

    def unpack(self, latents: Tensor) -> Tensor:
        """Latents as (B, channels, grid ...)."""
        if not self.grid:
            return latents.movedim(self.channel, 1)
        B, p = len(latents), self.patch  # an empty batch has a layout too
        C = latents.shape[-1] // p**2
        if p == 1:
            return latents.reshape(B, *self.grid, C).movedim(-1, 1)
        h, w = self.grid
        squares = latents.reshape(B, h, w, C, p, p)
        return squares.permute(0, 3, 1, 4, 2, 5).reshape(B, C, h * p, w * p)

    def pack(self, unpacked: Tensor) -> Tensor:
        """Undo ``unpack``."""
        if not self.grid:
            return unpacked.movedim(1, self.channel)
        B, C, p = len(unpacked), unpacked.shape[1], self.patch
        if p == 1:
            return unpacked.movedim(1, -1).flatten(1, -2)
        h, w = self.grid
        squares = unpacked.reshape(B, C, h, p, w, p)
        return squares.permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, C * p * p)


@dataclass(frozen=True)
class Groups:
    """How many parts a latent is divided into, and which.

    A group is a band of a group of channels. Bands come first, the lowest frequencies first:
    group ``band * channels + channel``.

    Attributes:
        channels: groups of channels, of neighbours and of nearly equal size.
        bands: bands of frequency; n of them pool by 2^(n-1), ..., 2.

    Example:
        >>> Groups(channels=16, bands=2).count, str(Groups(channels=16, bands=2)), str(ONE_GROUP)
        (32, '16 channels x 2 bands', 'one group')
    """

    channels: int = 1
    bands: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (1 <= self.channels <= MAX_CHANNELS and 1 <= self.bands <= MAX_BANDS):
            raise ValueError(
                f"groups have 1 to {MAX_CHANNELS} channels and 1 to {MAX_BANDS} bands, got {self!r}"
            )

    def __str__(self) -> str:
        """In words."""
        parts = [f"{self.channels} channels"] * (self.channels > 1)
        parts += [f"{self.bands} bands"] * (self.bands > 1)
        return " x ".join(parts) or "one group"

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.channels * self.bands

    @property
    def scales(self) -> tuple[int, ...]:
        """Sides of the pooled blocks, one per band, the largest first; the last is 1."""
        return tuple(2**level for level in reversed(range(self.bands)))

    def consist_of(self, finer: Groups) -> bool:
        """Whether each of these groups consists of whole groups of ``finer``.

        Example:
            >>> Groups(channels=1, bands=2).consist_of(Groups(channels=16, bands=3))
            True
        """
        return self.channels in (1, finer.channels) and self.bands <= finer.bands

    def places(self, channels: int) -> Tensor:
        """Group of channels of each of so many channels, shape (channels,)."""
        return torch.arange(channels, device="cpu") * self.channels // channels

    def merge(self, values: Tensor, finer: Groups) -> Tensor:
        """Add up values by group of ``finer``, (..., groups, n, n), to those of these groups.

        Fewer bands are the upper ones, and all the others as one.

        Raises:
            ValueError: if these groups do not consist of whole groups of ``finer``.

        Example:
            >>> values = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
            >>> Groups(bands=2).merge(values, Groups(bands=3)).flatten()
            tensor([3., 4.])
        """
        if not self.consist_of(finer):
            raise ValueError(f"{self} do not consist of {finer}")
        *first, _, n, m = values.shape
        shaped = values.reshape(*first, finer.bands, finer.channels, n, m)
        if self.channels == 1:
            shaped = shaped.sum(-3, keepdim=True)
        lower = shaped[..., : finer.bands - self.bands + 1, :, :, :].sum(-4, keepdim=True)
        upper = shaped[..., finer.bands - self.bands + 1 :, :, :, :]
        return torch.cat([lower, upper], dim=-4).flatten(-4, -3)


ONE_GROUP = Groups()
"""The whole latent as one group."""


def finest_groups(latents: Tensor, layout: Layout) -> Groups:
    """The groups that a profile has of latents: every channel, up to 16 of them, in three bands."""
    return Groups(min(MAX_CHANNELS, layout.unpack(latents[:1]).shape[1]), BANDS)


def pool(unpacked: Tensor, side: int) -> Tensor:
    """Means over blocks of ``side`` pixels along every axis of the grid, (B, C, blocks ...).

    The last block of an axis may be smaller.

    Example:
        >>> pool(torch.tensor([[[1.0, 3.0, 5.0]]]), 2)
        tensor([[[2., 5.]]])
    """
    sides = [min(side, size) for size in unpacked.shape[2:]]
    pooling = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(sides) - 1]
    return pooling(unpacked, sides, ceil_mode=True, count_include_pad=False)


def spread(pooled: Tensor, side: int, size: Sequence[int]) -> Tensor:
    """Every block's value on all of its pixels: with ``pool`` before it, the filter P.

    Example:
        >>> spread(torch.tensor([[[2.0, 5.0]]]), 2, (3,))
        tensor([[[2., 2., 5.]]])
    """
    sides = [float(min(side, pixels)) for pixels in size]
    pooled = functional.interpolate(pooled, scale_factor=sides, mode="nearest")
    for axis, pixels in enumerate(size, start=2):
        if pooled.shape[axis] > pixels:
            pooled = pooled.narrow(axis, 0, pixels)
    return pooled


class GroupCombination:
    """Combinations of latents with coefficients per group: combined first, then filtered.

    With the coefficients z_0, z_1, z_2 of three bands, from the lowest frequencies,

        sum_b z_b (band b of v) = P_4 (z_0 - z_1) v + P_2 (z_1 - z_2) v + z_2 v

    Example:
        >>> z = torch.tensor([[[1.0], [3.0]]])  # one step, two bands, one vector
        >>> v = torch.tensor([[[2.0, 4.0]]])  # mean 3, differences -1 and 1
        >>> GroupCombination(z, Groups(bands=2), Layout(), v)(0, [v], [0])
        tensor([[[0., 6.]]])
    """

    def __init__(
        self, coefficients: Tensor, groups: Groups, layout: Layout, latents: Tensor
    ) -> None:
        """Lay the coefficients out as they are multiplied.

        Args:
            coefficients: of n vectors, shape (T, groups, n).
            groups: the groups.
            layout: of the latents.
            latents: for their shape, device and type.
        """
        self._layout, self._sides = layout, groups.scales
        T, _, n = coefficients.shape
        z = coefficients.reshape(T, groups.bands, groups.channels, n)
        z = torch.cat([-z.diff(dim=1), z[:, -1:]], dim=1)
        places = groups.places(latents.shape[layout.channel] // layout.patch**2)
        z = z[:, :, places.repeat_interleave(layout.patch**2)].movedim(3, 1)
        # One entry per step and vector with all bands, to be multiplied with latents as they are.
        # Contiguous: with the strides of ``z`` a product takes seven times as long.
        axes = [1] * latents.ndim
        axes[layout.channel] = -1
        self._z = z.reshape(T, n, groups.bands, *axes).to(latents).contiguous()

    def __call__(self, step: int, vectors: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
        """The combination of some vectors with the coefficients of a step and these columns."""
        rows = self._z[step].unbind()
        total = rows[columns[0]] * vectors[0]  # (bands, B, ...)
        for column, vector in zip(columns[1:], vectors[1:], strict=True):
            total.addcmul_(rows[column], vector.to(total.dtype))
        lower, top = total[:-1], total[-1]
        return top + self._layout.pack(self._filter(lower)) if len(lower) else top

    def _filter(self, parts: Tensor) -> Tensor:
        """The sum of P_4 of the first part and P_2 of the second, unpacked.

        Added up as means of blocks: those of a larger block are spread over its smaller ones.
        """
        first, *others = self._layout.unpack(parts.flatten(0, 1)).chunk(len(parts))
        total = pool(first, self._sides[0])
        for part, side in zip(others, self._sides[1:], strict=False):
            means = pool(part, side)
            total = means + spread(total, 2, means.shape[2:])
        return spread(total, 2, first.shape[2:])


def group_products(vectors: Sequence[Tensor], groups: Groups, layout: Layout) -> Tensor:
    """Inner products of batches of latents, by prompt and group.

    Args:
        vectors: n batches of latents, each of shape (P, ...).
        groups: the groups.
        layout: of the latents.

    Returns:
        Sums over the elements of a group, divided by the elements of a latent, shape
        (P, groups, n, n), float64: the sum over all groups is that of the latent.
    """
    unpacked = [layout.unpack(vector) for vector in vectors]
    P, C = unpacked[0].shape[:2]
    size = tuple(unpacked[0].shape[2:])
    elements = C * math.prod(size)
    found = torch.zeros(P, groups.bands, C, len(vectors), len(vectors), dtype=torch.float64)
    many = max(1, CHUNK // (len(vectors) * math.prod(size)))  # channels at a time
    for prompt in range(P):
        for first in range(0, C, many):
            part = slice(first, first + many)
            rows = torch.stack([one[prompt, part].double() for one in unpacked])
            found[prompt, :, part] = _bands(rows, groups).cpu() / elements
    total = found.new_zeros(P, groups.bands, groups.channels, len(vectors), len(vectors))
    total.index_add_(2, groups.places(C), found)
    return total.flatten(1, 2)


def _bands(rows: Tensor, groups: Groups) -> Tensor:
    """Inner products of rows (n, C, grid ...) by band and channel, (bands, C, n, n).

    A band is the difference of two filters, and so are its inner products.
    """
    filtered = []
    for side in groups.scales:
        means = rows if side == 1 else pool(rows, side) * _weights(rows.shape[2:], side).to(rows)
        flat = means.flatten(2).movedim(1, 0)  # (C, n, blocks)
        filtered.append(flat @ flat.mT)
    products = torch.stack(filtered)
    return torch.cat([products[:1], products.diff(dim=0)])


def _weights(size: Sequence[int], side: int) -> Tensor:
    """Square root of the number of pixels of every block."""
    weights = torch.ones((), dtype=torch.float64)
    for pixels in size:
        step = min(side, pixels)
        first = torch.arange(0, pixels, step)
        weights = weights[..., None] * (pixels - first).clamp_max(step).double().sqrt()
    return weights


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """Inner products of full runs by group, added up over folds of prompts.

    Of the start x_0 and the outputs v_0 ... v_{T-1} only: the latents are combinations of them.

    Attributes:
        groups: the finest groups.
        products: sums over the prompts of a fold, each times its weight, shape
            (folds, groups, T + 1, T + 1), float64.
        counts: number of prompts of every fold, int64, shape (folds,).
    """

    groups: Groups
    products: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        """Check shapes, types, finiteness and symmetry."""
        shape = tuple(self.products.shape)
        if len(shape) != 4 or shape[1] != self.groups.count or shape[2] != shape[3]:
            raise ValueError(f"products of {self.groups} cannot have shape {shape}")
        if self.products.dtype != torch.float64 or not torch.isfinite(self.products).all():
            raise ValueError("products must be finite float64")
        if not torch.equal(self.products, self.products.mT):
            raise ValueError("products must be symmetric")
        counts = self.counts
        if counts.dtype != torch.int64 or counts.shape != shape[:1] or bool((counts < 0).any()):
            raise ValueError(f"counts must be {shape[0]} numbers of prompts")

    @classmethod
    def of(
        cls,
        start: Tensor,
        outputs: Sequence[Tensor],
        layout: Layout,
        *,
        folds: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> GroupStatistics:
        """The statistics of full runs.

        Args:
            start: x_0, shape (P, ...).
            outputs: v_0 ... v_{T-1}, like it.
            layout: of the latents.
            folds: fold of every prompt.
            weights: how much each counts; by default all count alike.
        """
        groups = finest_groups(start, layout)
        found = group_products([start, *outputs], groups, layout)
        products = torch.zeros(FOLDS, *found.shape[1:], dtype=torch.float64)
        counted = [1.0] * len(found) if weights is None else weights
        for one, fold, weight in zip(found, folds, counted, strict=True):  # in the order of prompts
            products[fold] += weight * one
        products = (products + products.mT) / 2
        return cls(groups, products, torch.bincount(torch.tensor(folds), minlength=FOLDS))

    def __add__(self, other: GroupStatistics) -> GroupStatistics:
        """The statistics of the prompts of both."""
        if self.groups != other.groups or self.products.shape != other.products.shape:
            raise ValueError("statistics of other groups or steps cannot be added")
        return replace(
            self, products=self.products + other.products, counts=self.counts + other.counts
        )

    def select(self, folds: Sequence[int]) -> GroupStatistics:
        """The statistics of some folds."""
        kept = torch.zeros(len(self.counts), dtype=torch.bool)
        kept[list(folds)] = True
        products = self.products.where(kept[:, None, None, None], 0.0)
        return replace(self, products=products, counts=self.counts.where(kept, 0))

    def gram(self, rows: Tensor, groups: Groups) -> Gram:
        """The Gram matrices of combinations of the start and the outputs, the mean of all prompts.

        Args:
            rows: weights of x_0, v_0 ... v_{T-1} in each of R vectors, shape (R, T + 1).
            groups: these, or fewer.
        """
        mean = self.products.sum(0, keepdim=True) / self.counts.sum().clamp_min(1)
        return Gram(groups.merge(mean, self.groups)[0], groups.count).combined(rows)
