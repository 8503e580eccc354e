"""FID and KID: how far a set of pictures is from another set, whatever stands beside what.

Both need many pictures. FID of few is far too high, whatever they show, and comparable only
between sets of the same size; KID has no such bias but scatters. Knows no file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ertacache.metrics.inception import inception_features

__all__ = ["fid", "frechet_distance", "kid", "polynomial_mmd"]


def fid(result: Tensor, reference: Tensor) -> float:
    """Frechet inception distance of two sets of pictures or frames, at least two of each.

    Args:
        result: values from 0 to 1, shape (N, 3, height, width) or (N, frames, 3, height, width).
        reference: the same for the other set, of any number and size.
    """
    return frechet_distance(inception_features(result), inception_features(reference))


def kid(result: Tensor, reference: Tensor) -> float:
    """Kernel inception distance: the unbiased estimate over all pictures, without subsets."""
    return polynomial_mmd(inception_features(result), inception_features(reference))


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Squared Frechet distance of the Gaussians fitted to two sets of features.

    |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), with C = X^T X of the centred features X.
    The last trace is the sum of the singular values of X_a X_b^T, which needs no matrix root and
    holds for singular covariances as well.

    Args:
        a: features, shape (N, D), at least two.
        b: features, shape (M, D), at least two.

    Example:
        >>> a = torch.tensor([[-1.0], [1.0]])
        >>> round(frechet_distance(a, 2 * a + 3), 6)  # 3^2 + 2 (2 - 1)^2
        11.0
    """
    _check(a, b)
    a, b = a.double(), b.double()
    roots = [_root(x) for x in (a, b)]
    spread = sum(root.square().sum() for root in roots)
    overlap = torch.linalg.svdvals(roots[0] @ roots[1].mT).sum()
    offset = (a.mean(0) - b.mean(0)).square().sum()
    return float(offset + spread - 2 * overlap)


def _root(features: Tensor) -> Tensor:
    """A matrix R with R^T R the covariance, of no more rows than columns."""
    centred: Tensor = (features - features.mean(0)) / (len(features) - 1) ** 0.5
    if len(features) <= features.shape[1]:
        return centred
    upper: Tensor = torch.linalg.qr(centred, mode="r").R
    return upper


def polynomial_mmd(a: Tensor, b: Tensor) -> float:
    """Squared maximum mean discrepancy with the kernel (x · y / D + 1)^3, the unbiased estimate.

    Args:
        a: features, shape (N, D), at least two.
        b: features, shape (M, D), at least two.
    """
    _check(a, b)
    a, b = a.double(), b.double()
    within = [_mean_of_different(_kernel(x, x)) for x in (a, b)]
    return float(within[0] + within[1] - 2 * _kernel(a, b).mean())


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.mT / x.shape[1] + 1) ** 3


def _mean_of_different(kernel: Tensor) -> Tensor:
    """The mean over pairs of two different entries."""
    n = len(kernel)
    return (kernel.sum() - kernel.diagonal().sum()) / (n * (n - 1))


def _check(a: Tensor, b: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"features of shapes {tuple(a.shape)} and {tuple(b.shape)} do not match")
    if min(len(a), len(b)) < 2:
        raise ValueError("FID and KID need at least two pictures on each side")
