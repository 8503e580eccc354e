"""FID and KID: distances between two sets of images, independent of any pairing.

Both need many images. FID of few images is biased upwards and comparable only between sets of the
same size; KID is unbiased but has a high variance.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from ertacache.metrics.files import is_video, media_files, read_media
from ertacache.metrics.inception import inception_features

__all__ = ["ReferenceFid", "frechet_distance", "polynomial_mmd", "reference_images"]

MIN_KID = 50  # images on each side; with fewer, KID says more of the choice than of the sets


def reference_images(folder: Path) -> list[Path]:
    """The images below a folder; a ``ValueError`` if they are too few for FID."""
    paths = [path for path in media_files(folder).values() if not is_video(path)]
    if len(paths) < 2:
        raise ValueError(f"FID needs at least two images in {str(folder)!r}")
    return paths


class ReferenceFid:
    """FID to the images of a folder, whose features are computed once."""

    def __init__(self, folder: Path) -> None:
        """Read the images, of any sizes."""
        images = (read_media(path)[None] for path in reference_images(folder))
        self._features = torch.cat([inception_features(image) for image in images])

    def __call__(self, images: Tensor) -> float:
        """FID of images with values from 0 to 1, shape (N, 3, height, width)."""
        return frechet_distance(inception_features(images), self._features)


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

    Warns if there are fewer than 50 images on a side.

    Args:
        a: features, shape (N, D), at least two.
        b: features, shape (M, D), at least two.
    """
    _check(a, b)
    if min(len(a), len(b)) < MIN_KID:
        warnings.warn(
            f"KID of {len(a)} and {len(b)} images is unreliable: take at least {MIN_KID} on each "
            "side",
            stacklevel=2,
        )
    a, b = a.double(), b.double()
    within = [_mean_of_different(_kernel(x, x)) for x in (a, b)]
    return float(within[0] + within[1] - 2 * _kernel(a, b).mean())


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.mT / x.shape[1] + 1) ** 3


def _mean_of_different(kernel: Tensor) -> Tensor:
    """The mean over pairs of different entries."""
    n = len(kernel)
    return (kernel.sum() - kernel.diagonal().sum()) / (n * (n - 1))


def _check(a: Tensor, b: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"features of shapes {tuple(a.shape)} and {tuple(b.shape)} do not match")
    if min(len(a), len(b)) < 2:
        raise ValueError("FID and KID need at least two images on each side")
