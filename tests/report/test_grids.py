from __future__ import annotations

import torch

from ertacache.report.grids import GAP, TEXT_HEIGHT, difference, grid, labelled_row


def test_differences_are_amplified_and_bounded() -> None:
    a, b = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.5, 0.51, 1.0])
    assert torch.allclose(difference(a, b, gain=8.0), torch.tensor([0.0, 0.08, 1.0]), atol=1e-6)


def test_rows_stand_under_their_labels() -> None:
    white, black = torch.ones(3, 3, 4, 4), torch.zeros(3, 3, 4, 4)
    sheet = grid([("first", black), ("second", white)], scale=2)
    assert sheet.size == (3 * (8 + GAP) + GAP, 2 * (8 + GAP + TEXT_HEIGHT) + GAP)
    assert sheet.getpixel((GAP, GAP // 2 + TEXT_HEIGHT)) == (0, 0, 0)


def test_a_row_of_videos_stands_under_labels_and_keeps_its_pixels() -> None:
    videos = torch.rand(2, 4, 3, 6, 200, generator=torch.Generator().manual_seed(0))
    row = labelled_row([("one", videos[0]), ("another", videos[1])])
    assert row.shape == (4, 3, TEXT_HEIGHT + 6, 400)
    assert torch.equal(row[..., TEXT_HEIGHT:, :200], videos[0])
    assert torch.equal(row[..., TEXT_HEIGHT:, 200:], videos[1])
    labels = row[..., :TEXT_HEIGHT, :]
    assert torch.equal(labels[0], labels[3])
    assert (labels[..., :200] < 0.5).sum() < (labels[..., 200:] < 0.5).sum()  # the longer one


def test_a_label_wider_than_its_image_is_whole() -> None:
    image = torch.zeros(3, 8, 8)
    row = labelled_row([("difference", image), ("", image)])
    width = row.shape[-1] // 2
    assert width > 40
    assert torch.equal(row[:, -8:, :8], image)
    assert bool((row[:, -8:, 8:width] == 1).all())
