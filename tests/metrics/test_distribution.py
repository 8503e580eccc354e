"""Distances of Gaussians that can be worked out by hand."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import Tensor

from ertacache.metrics import distribution
from ertacache.metrics.distribution import (
    ReferenceFid,
    frechet_distance,
    polynomial_mmd,
    reference_images,
)


def features(*axes: float) -> Tensor:
    """Points whose covariance is diagonal, with these standard deviations, and mean 0."""
    rows = []
    for place, axis in enumerate(axes):
        point = torch.zeros(len(axes), dtype=torch.float64)
        point[place] = axis
        rows += [point, -point]
    n = len(rows)
    return torch.stack(rows) * ((n - 1) / 2) ** 0.5


def test_commuting_gaussians_by_hand() -> None:
    a, b = features(1, 2), features(3, 1) + torch.tensor([1.0, -2.0])
    assert torch.cov(a.T).flatten().tolist() == pytest.approx([1, 0, 0, 4])
    # (1 - 3)^2 + (2 - 1)^2 of the deviations, 1^2 + 2^2 of the means.
    assert frechet_distance(a, b) == pytest.approx(10)
    assert frechet_distance(b, a) == pytest.approx(10)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n", "m", "d"), [(40, 30, 5), (4, 30, 5), (4, 3, 5)])
def test_any_gaussians_by_the_matrix_root(n: int, m: int, d: int) -> None:
    generator = torch.Generator().manual_seed(n + m)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    a = torch.randn(n, d, generator=generator, dtype=torch.float64)
    b = torch.randn(m, d, generator=generator, dtype=torch.float64) @ mix + 1
    covariances = [torch.cov(x.T) for x in (a, b)]
    root = scipy.linalg.sqrtm((covariances[0] @ covariances[1]).numpy()).real
    offset = (a.mean(0) - b.mean(0)).square().sum().item()
    expected = offset + sum(c.trace().item() for c in covariances) - 2 * root.trace()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-5)


def test_the_kernel_distance_by_hand() -> None:
    a, b = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]])
    # Within a (0 * 1 + 1)^3 = 1, within b (2 * 3 + 1)^3 = 343, across (1 + 1 + 27 + 64) / 4.
    assert polynomial_mmd(a, b) == pytest.approx(1 + 343 - 2 * 23.25)
    doubled = [torch.cat([x, x], dim=1) for x in (a, b)]
    assert polynomial_mmd(doubled[0], doubled[1]) == pytest.approx(297.5)


def test_the_kernel_distance_has_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(2, 10, 4, generator=generator) for _ in range(400)]
    values = torch.tensor([polynomial_mmd(a, b) for a, b in draws])
    assert abs(values.mean()) < 3 * values.std() / 20


def test_kid_of_few_images_has_a_warning() -> None:
    many, few = torch.zeros(50, 2), torch.zeros(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polynomial_mmd(many, many)
    for pair, numbers in (((many, few), "50 and 2"), ((few, many), "2 and 50")):
        with pytest.warns(UserWarning, match=f"KID of {numbers} images is unreliable: .* 50 on"):
            polynomial_mmd(*pair)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        frechet_distance(torch.zeros(1, 4), torch.zeros(5, 4))
    with pytest.raises(ValueError, match="do not match"):
        polynomial_mmd(torch.zeros(5, 3), torch.zeros(5, 4))


def test_fid_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "inception_features", lambda x: x.mean((2, 3))[:, :1])
    for name, level in (("a.png", 0), ("b.png", 255)):
        Image.new("RGB", (4, 4), (level, level, level)).save(tmp_path / name)
    fid = ReferenceFid(tmp_path)
    same = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 4, 4)
    assert fid(same) == pytest.approx(0.0)
    assert fid(same + 3) == pytest.approx(9.0)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FID needs at least two images"):
        reference_images(tmp_path)
