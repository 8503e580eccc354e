from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.metrics import motion_error, temporal_flickering


def flat(*levels: float) -> Tensor:
    """A video whose frames are of one level each."""
    return torch.tensor(levels).reshape(1, -1, 1, 1, 1).expand(1, len(levels), 3, 4, 4)


def test_flickering_is_the_formula_of_vbench() -> None:
    # Levels 51, 102, 0: mean absolute differences 51 and 102, their mean 76.5.
    video = flat(51 / 255, 102 / 255, 0)
    assert temporal_flickering(video).item() == pytest.approx((255 - 76.5) / 255)
    assert temporal_flickering(flat(0.3, 0.3)).item() == 1


def test_motion_error_sees_changes_and_no_offset() -> None:
    reference = flat(0.1, 0.2, 0.4)
    assert motion_error(reference + 0.3, reference).item() == pytest.approx(0, abs=1e-7)
    # Steps 0.3 and 0.0 against 0.1 and 0.2: they differ by 0.2 each.
    assert motion_error(flat(0.1, 0.4, 0.4), reference).item() == pytest.approx(0.2)


def test_an_image_and_a_single_frame_are_refused() -> None:
    image = torch.zeros(1, 3, 8, 8)
    with pytest.raises(ValueError, match="videos have the shape"):
        motion_error(image, image)
    with pytest.raises(ValueError, match="one frame"):
        temporal_flickering(flat(0.5))
    with pytest.raises(ValueError, match="differ"):
        motion_error(flat(0, 1), flat(0, 1, 0))
