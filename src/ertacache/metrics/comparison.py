"""Metrics by name, and what they say of many pairs: a mean with its interval, or why there is none.

A row of ``METRICS`` is all that a metric needs. Knows no file and draws no table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ertacache.metrics.clip import DEFAULT_CLIP, Clip
from ertacache.metrics.distribution import frechet_distance, polynomial_mmd
from ertacache.metrics.fidelity import psnr, ssim
from ertacache.metrics.inception import inception_features
from ertacache.metrics.intervals import bootstrap_interval
from ertacache.metrics.perceptual import Network, load_lpips, lpips
from ertacache.metrics.video import IDENTICAL, frame_psnr, motion_error, temporal_flickering
from ertacache.metrics.weights import NotAvailableError

__all__ = [
    "METRICS",
    "SET_METRICS",
    "Comparison",
    "Metric",
    "Score",
    "compare_sets",
    "open_metric",
    "parse_metrics",
]

PairMetric = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """What a reader and a table need to know of a metric.

    Attributes:
        name: how it is asked for.
        unit: written after a value.
        digits: after the point.
        higher_is_better: which way is good.
        videos_only: whether it means nothing for a picture.
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
SET_METRICS = ("fid", "kid")  # of two sets of pictures, not of two pictures


@dataclass(frozen=True)
class Score:
    """What a metric says of all pairs.

    Attributes:
        metric: its name.
        mean: None where it is not available.
        low: lower end of the 95 % bootstrap interval over the pairs; None for a single pair and
            for a metric of sets.
        high: upper end.
        count: pairs, or pictures on the smaller side for a metric of sets.
        identical: pairs without any difference; they count for 100 dB in a mean PSNR.
        reason: why the metric is not available, and what to do about it.
    """

    metric: str
    mean: float | None
    low: float | None = None
    high: float | None = None
    count: int = 0
    identical: int = 0
    reason: str | None = None


def parse_metrics(text: str) -> tuple[str, ...]:
    """Metric names, separated by commas.

    Example:
        >>> parse_metrics("psnr, lpips-alex")
        ('psnr', 'lpips-alex')
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"no metric is called {unknown[0]!r}; there are {', '.join(METRICS)}")
    return names


def open_metric(
    name: str, *, clip: str = DEFAULT_CLIP, device: str | torch.device = "cpu"
) -> PairMetric:
    """A metric of two batches of pictures or videos, with a value for each entry.

    Args:
        name: one of ``METRICS`` that judges pairs.
        clip: folder or hub id of the CLIP model.
        device: where the networks run.

    Raises:
        NotAvailableError: if its weights are not there; the message says how to get them.

    Example:
        >>> metric = open_metric("ssim")
        >>> metric(torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 16, 16)).tolist()
        [1.0, 1.0]
    """
    if name == "psnr":
        return lambda a, b: frame_psnr(a, b) if a.ndim == 5 else psnr(a, b)
    if name == "lpips-alex" or name == "lpips-vgg":
        network: Network = "alex" if name == "lpips-alex" else "vgg"
        load_lpips(network, torch.device(device))  # refused here rather than at the first pair
        return lambda a, b: lpips(a.to(device), b.to(device), network=network)
    if name == "clip":
        return Clip.load(clip, device=device).image_similarity
    pairs: dict[str, PairMetric] = {
        "ssim": ssim,
        "flickering": lambda a, b: temporal_flickering(a),
        "motion": motion_error,
    }
    if name not in pairs:
        raise ValueError(f"no metric of two pictures is called {name!r}")
    return pairs[name]


class Comparison:
    """Pairs of pictures or videos under several metrics, one pair after the other."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        clip: str = DEFAULT_CLIP,
        device: str | torch.device = "cpu",
    ) -> None:
        """Open the metrics; one that is not available is told of in its score.

        Args:
            names: of metrics that judge pairs.
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
        """Judge one pair of pictures (3, height, width) or videos (frames, 3, height, width)."""
        for name, values in self.values.items():
            fits = name in self._open and (result.ndim == 4 or not METRICS[name].videos_only)
            value = self._open[name](result[None], reference[None]) if fits else None
            values.append(None if value is None else float(value[0]))

    def scores(self) -> list[Score]:
        """What each metric says of all pairs so far."""
        return [self._score(name) for name in self.values]

    def _score(self, name: str) -> Score:
        values = [value for value in self.values[name] if value is not None]
        if not values:
            return Score(name, None, reason=self._reasons.get(name, f"{name} is for videos only"))
        identical = sum(map(math.isinf, values)) if name == "psnr" else 0
        bounded = [min(value, IDENTICAL) if math.isinf(value) else value for value in values]
        low, high = bootstrap_interval(bounded) if len(bounded) > 1 else (None, None)
        mean = sum(bounded) / len(bounded)
        return Score(name, mean, low, high, len(values), identical)


def compare_sets(
    names: Sequence[str], results: Iterable[Tensor], references: Iterable[Tensor]
) -> list[Score]:
    """FID and KID of two sets of pictures or videos, whose frames count as pictures.

    Args:
        names: of ``SET_METRICS``.
        results: pictures (3, height, width) or videos (frames, 3, height, width), of any sizes.
        references: the other set, of any number.
    """
    distances = {"fid": frechet_distance, "kid": polynomial_mmd}
    try:
        a, b = (
            torch.cat([inception_features(x[None]) for x in pictures])
            for pictures in (results, references)
        )
    except NotAvailableError as error:
        return [Score(name, None, reason=str(error)) for name in names]
    count = min(len(a), len(b))
    return [Score(name, distances[name](a, b), count=count) for name in names]
