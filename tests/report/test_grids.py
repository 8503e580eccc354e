from __future__ import annotations

import torch

from ertacache.report.grids import GAP, TEXT_HEIGHT, difference, grid


def test_differences_are_amplified_and_bounded() -> None:
    a, b = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.5, 0.51, 1.0])
    assert torch.allclose(difference(a, b, gain=8.0), torch.tensor([0.0, 0.08, 1.0]), atol=1e-6)


def test_rows_stand_under_their_labels() -> None:
    white, black = torch.ones(3, 3, 4, 4), torch.zeros(3, 3, 4, 4)
    sheet = grid([("first", black), ("second", white)], scale=2)
    assert sheet.size == (3 * (8 + GAP) + GAP, 2 * (8 + GAP + TEXT_HEIGHT) + GAP)
    assert sheet.getpixel((GAP, GAP // 2 + TEXT_HEIGHT)) == (0, 0, 0)
