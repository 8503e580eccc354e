from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ertacache.metrics.inception import FEATURES, inception_features, resize
from tests.metrics.needs import needs_inception
from tests.metrics.patterns import distorted, pattern

ROWS = json.loads((Path(__file__).parent / "golden" / "inception.json").read_text())["rows"]
MAKERS = {"pattern": pattern, "distorted": distorted}


@needs_inception
def test_features_are_those_of_the_package_that_carries_the_network() -> None:
    for row in ROWS:
        image = MAKERS[row["image"]](row["height"], row["width"])
        (features,) = inception_features(image)
        assert features.shape == (FEATURES,)
        assert features[:6].tolist() == pytest.approx(row["first"], abs=5e-5)
        assert features.norm().item() == pytest.approx(row["norm"], abs=1e-3)
        assert features.mean().item() == pytest.approx(row["mean"], abs=1e-5)


def test_resizing_starts_at_the_first_pixel() -> None:
    # Width 3 to 6: positions 0, 0.5, 1, 1.5, 2, 2.5; the last lies beyond and takes the border.
    row = torch.tensor([0.0, 1.0, 4.0]).expand(1, 3, 2, 3)
    assert resize(row, 6)[0, 0, 0].tolist() == pytest.approx([0, 0.5, 1, 2.5, 4, 4])
    column = row.mT
    assert torch.allclose(resize(column, 6), resize(row, 6).mT)


def test_a_wrong_shape_is_refused_before_the_weights_are_read() -> None:
    with pytest.raises(ValueError, match="images have the shape"):
        inception_features(torch.zeros(3, 8, 8))
