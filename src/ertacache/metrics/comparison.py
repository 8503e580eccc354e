"""Metrics by name, and their means over many pairs with bootstrap intervals.

Each metric has a row in ``METRICS``. A metric whose weights are missing gives a reason in place of
a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ertacache.metrics.clip import DEFAULT_CLIP, Clip
from ertacache.metrics.distribution import frechet_distance, polynomial_mmd
from ertacache.metrics.image import IDENTICAL, psnr, ssim
from ertacache.metrics.inception import inception_features
from ertacache.metrics.perceptual import Network, load_lpips, lpips
from ertacache.metrics.video import motion_error, temporal_flickering
from ertacache.metrics.weights import NotAvailableError

__all__ = [
    "METRICS",
    "SET_METRICS",
    "Comparison",
    "Metric",
    "Score",
    "bootstrap_interval",
    "compare_sets",
    "open_metric",
    "parse_metrics",
]

PairMetric = Callable[[Tensor, Tensor], Tensor]

RESAMPLES = 2000


@dataclass(frozen=True)
class Metric:
    """How a metric is named and shown.

    Attributes:
        name: its name on the command line.
        unit: written after a value.
        digits: after the decimal point.
        higher_is_better: whether a higher value is better.
        videos_only: whether it is undefined for an image.
    """

    name: str
    unit: str = ""
    digits: int = 4
    higher_is_better: bool = False
    videos_only: bool = False


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("psnr", unit="dB", digits=2, higher_is_better=True),
        Metric("ssim", higher_is_better=True),
        Metric("lpips-alex"),
        Metric("lpips-vgg"),
        Metric("clip", higher_is_better=True),
        Metric("flickering", higher_is_better=True, videos_only=True),
        Metric("motion", videos_only=True),
        Metric("fid", digits=2),
        Metric("kid", digits=5),
    )
}
SET_METRICS = ("fid", "kid")  # of two sets of images, not of two images


@dataclass(frozen=True)
class Score:
    """A metric over all pairs.

    Attributes:
        metric: its name.
        mean: None where it is not available.
        low: lower end of the 95 % bootstrap interval over the pairs; None for a single pair and
            for a metric of sets.
        high: upper end.
        count: pairs, or images of the smaller set for a metric of sets.
        identical: pairs without any difference; a mean PSNR counts each as 100 dB.
        reason: why the metric is not available, and what to install.
    """

    metric: str
    mean: float | None
    low: float | None = None
    high: float | None = None
    count: int = 0
    identical: int = 0
    reason: str | None = None


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of a mean: quantiles of the means of resampled values.

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


def parse_metrics(text: str) -> tuple[str, ...]:
    """Metric names, separated by commas.

    Example:
        >>> parse_metrics("psnr, lpips-alex")
        ('psnr', 'lpips-alex')
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    return names


def open_metric(
    name: str, *, clip: str = DEFAULT_CLIP, device: str | torch.device = "cpu"
) -> PairMetric:
    """A metric of two batches of images or videos, with a value for each entry.

    Args:
        name: one of ``METRICS``, but not of ``SET_METRICS``.
        clip: folder or hub id of the CLIP model.
        device: where the networks run.

    Raises:
        NotAvailableError: its weights are not installed; the message says how to get them.

    Example:
        >>> metric = open_metric("ssim")
        >>> metric(torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 16, 16)).tolist()
        [1.0, 1.0]
    """
    if name == "lpips-alex" or name == "lpips-vgg":
        network: Network = "alex" if name == "lpips-alex" else "vgg"
        load_lpips(network, torch.device(device))  # raises here rather than at the first pair
        return lambda a, b: lpips(a.to(device), b.to(device), network=network)
    if name == "clip":
        return Clip.load(clip, device=device).image_similarity
    pairs: dict[str, PairMetric] = {
        "psnr": psnr,
        "ssim": ssim,
        "flickering": lambda a, b: temporal_flickering(a),
        "motion": motion_error,
    }
    if name not in pairs:
        raise ValueError(f"{name!r} is no metric of two images")
    return pairs[name]


class Comparison:
    """Pairs of images or videos under several metrics, added one by one."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        clip: str = DEFAULT_CLIP,
        device: str | torch.device = "cpu",
    ) -> None:
        """Open the metrics; the score of one that is not available gives the reason.

        Args:
            names: of metrics of pairs.
            clip: folder or hub id of the CLIP model.
            device: where the networks run.
        """
        self.values: dict[str, list[float | None]] = {name: [] for name in names}
        self._open: dict[str, PairMetric] = {}
        self._reasons: dict[str, str] = {}
        for name in names:
            try:
                self._open[name] = open_metric(name, clip=clip, device=device)
            except NotAvailableError as error:
                self._reasons[name] = str(error)

    def add(self, result: Tensor, reference: Tensor) -> None:
        """Evaluate a pair of images (3, height, width) or videos (frames, 3, height, width)."""
        for name, values in self.values.items():
            moving = result.ndim == 4 and len(result) > 1  # a video of one frame is a still
            fits = name in self._open and (moving or not METRICS[name].videos_only)
            value = self._open[name](result[None], reference[None]) if fits else None
            values.append(None if value is None else float(value[0]))

    def scores(self) -> list[Score]:
        """Each metric over all pairs so far."""
        return [self._score(name) for name in self.values]

    def _score(self, name: str) -> Score:
        values = [value for value in self.values[name] if value is not None]
        if not values:
            return Score(name, None, reason=self._reasons.get(name, f"{name} is for videos only"))
        identical = sum(map(math.isinf, values)) if name == "psnr" else 0
        if name == "psnr":
            values = [min(value, IDENTICAL) for value in values]
        low, high = bootstrap_interval(values) if len(values) > 1 else (None, None)
        return Score(name, sum(values) / len(values), low, high, len(values), identical)


def compare_sets(
    names: Sequence[str], results: Iterable[Tensor], references: Iterable[Tensor]
) -> list[Score]:
    """FID and KID of two sets of images or videos, whose frames count as images.

    Args:
        names: of ``SET_METRICS``.
        results: images (3, height, width) or videos (frames, 3, height, width), of any sizes.
        references: the other set, of any number.
    """
    distances = {"fid": frechet_distance, "kid": polynomial_mmd}
    try:
        a, b = (
            torch.cat([inception_features(x[None]) for x in images])
            for images in (results, references)
        )
    except NotAvailableError as error:
        return [Score(name, None, reason=str(error)) for name in names]
    count = min(len(a), len(b))
    return [Score(name, distances[name](a, b), count=count) for name in names]
