from __future__ import annotations

import torch

from ertacache.models.opensora.embeddings import PatchEmbed, position_embedding

CPU = torch.device("cpu")


def test_places_are_those_of_the_stretched_square() -> None:
    """2 rows of 8 patches: a square of 4, so that columns are 0.5 apart and rows 2."""
    table = position_embedding(2, 8, dim=8, scale=1.0, device=CPU).view(2, 8, 8)
    column, row = torch.tensor([1.5, 0.015]), torch.tensor([2.0, 0.02])
    expected = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()])
    torch.testing.assert_close(table[1, 3], expected)


def test_scale_divides_places() -> None:
    small = position_embedding(4, 4, dim=8, scale=1.0, device=CPU).view(4, 4, 8)
    large = position_embedding(4, 4, dim=8, scale=2.0, device=CPU).view(4, 4, 8)
    torch.testing.assert_close(large[2, 2], small[1, 1])


def test_edges_are_filled_up_with_zeros() -> None:
    embed = PatchEmbed((2, 2, 2), in_channels=1, dim=3)
    video = torch.randn(1, 1, 3, 5, 3)
    filled = torch.zeros(1, 1, 4, 6, 4)
    filled[:, :, :3, :5, :3] = video
    with torch.no_grad():
        assert embed(video).shape == (1, 3, 2, 3, 2)
        assert torch.equal(embed(video), embed(filled))
