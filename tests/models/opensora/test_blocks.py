"""Each module: its formula, and the positions that it mixes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.models.opensora.blocks import (
    CrossAttention,
    OpenSoraBlock,
    PatchEmbed,
    RotaryEmbedding,
    position_embedding,
    rotate,
)

CPU = torch.device("cpu")
DIM, FRAMES, PATCHES = 16, 3, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def block(*, temporal: bool) -> OpenSoraBlock:
    return OpenSoraBlock(DIM, heads=2, mlp_ratio=2.0, qk_norm=True, temporal=temporal).eval()


def changed(temporal: bool) -> Tensor:
    """The (frames, patches) that change when the first patch of the first frame does."""
    x, text = torch.randn(1, FRAMES, PATCHES, DIM), torch.randn(1, 5, DIM)
    other = x.clone()
    other[:, 0, 0] += torch.randn(DIM)
    layer, modulation = block(temporal=temporal), torch.randn(1, 1, 6, DIM)
    rotary = RotaryEmbedding(DIM // 2)(FRAMES) if temporal else None
    with torch.no_grad():
        outputs = [layer(y, text, None, modulation, rotary) for y in (x, other)]
    return (outputs[0] != outputs[1]).any(-1)[0]


def test_spatial_block_mixes_within_a_frame() -> None:
    assert torch.equal(
        changed(temporal=False), torch.tensor([[True] * 4, [False] * 4, [False] * 4])
    )


def test_temporal_block_mixes_within_a_patch() -> None:
    assert torch.equal(changed(temporal=True), torch.tensor([[True, False, False, False]] * 3))


def test_masked_text_has_no_effect() -> None:
    layer, x, text = CrossAttention(DIM, heads=2), torch.randn(1, 2, 3, DIM), torch.randn(1, 4, DIM)
    mask = torch.tensor([[True, True, False, False]])
    with torch.no_grad():
        short, padded = layer(x, text[:, :2], None), layer(x, text, mask)
    torch.testing.assert_close(padded, short)


def test_scores_of_rotated_vectors_depend_on_the_distance() -> None:
    q, k = torch.randn(2, 1, DIM)
    rotary = RotaryEmbedding(DIM)(7)
    queries, keys = rotate(q.expand(7, DIM), rotary), rotate(k.expand(7, DIM), rotary)
    scores = queries @ keys.T
    for distance in range(-6, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, 0], scores[0, 3])


def test_modulation_is_per_frame() -> None:
    layer, x, text = (
        block(temporal=False),
        torch.randn(1, FRAMES, PATCHES, DIM),
        torch.randn(1, 5, DIM),
    )
    each = torch.randn(1, FRAMES, 6, DIM)
    with torch.no_grad():
        together = layer(x, text, None, each)
        alone = [layer(x, text, None, each[:, [k]])[:, k] for k in range(FRAMES)]
    torch.testing.assert_close(together, torch.stack(alone, dim=1))


def test_positions_are_those_of_the_stretched_square() -> None:
    """2 rows of 8 patches: a square of 4, so that columns are 0.5 apart and rows 2."""
    embedding = position_embedding(2, 8, dim=8, scale=1.0, device=CPU).view(2, 8, 8)
    column, row = torch.tensor([1.5, 0.015]), torch.tensor([2.0, 0.02])
    expected = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()])
    torch.testing.assert_close(embedding[1, 3], expected)


def test_scale_divides_positions() -> None:
    small = position_embedding(4, 4, dim=8, scale=1.0, device=CPU).view(4, 4, 8)
    large = position_embedding(4, 4, dim=8, scale=2.0, device=CPU).view(4, 4, 8)
    torch.testing.assert_close(large[2, 2], small[1, 1])


def test_incomplete_patches_are_padded_with_zeros() -> None:
    embed = PatchEmbed((2, 2, 2), in_channels=1, dim=3)
    video = torch.randn(1, 1, 3, 5, 3)
    padded = torch.zeros(1, 1, 4, 6, 4)
    padded[:, :, :3, :5, :3] = video
    with torch.no_grad():
        assert embed(video).shape == (1, 3, 2, 3, 2)
        assert torch.equal(embed(video), embed(padded))
