"""What each layer mixes, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ertacache.models.opensora.blocks import (
    CrossAttention,
    OpenSoraBlock,
    RotaryEmbedding,
    rotate,
)

DIM, FRAMES, PATCHES = 16, 3, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def block(*, temporal: bool) -> OpenSoraBlock:
    return OpenSoraBlock(DIM, heads=2, mlp_ratio=2.0, qk_norm=True, temporal=temporal).eval()


def changed(temporal: bool) -> Tensor:
    """Which of the (frames, patches) move when the first patch of the first frame does."""
    x, text = torch.randn(1, FRAMES, PATCHES, DIM), torch.randn(1, 5, DIM)
    other = x.clone()
    other[:, 0, 0] += torch.randn(DIM)
    layer, modulation = block(temporal=temporal), torch.randn(1, 1, 6, DIM)
    rotary = RotaryEmbedding(DIM // 2)(FRAMES) if temporal else None
    with torch.no_grad():
        outputs = [layer(y, text, None, modulation, rotary) for y in (x, other)]
    return (outputs[0] != outputs[1]).any(-1)[0]


def test_spatial_block_stays_within_a_frame() -> None:
    assert torch.equal(
        changed(temporal=False), torch.tensor([[True] * 4, [False] * 4, [False] * 4])
    )


def test_temporal_block_stays_within_a_patch() -> None:
    assert torch.equal(changed(temporal=True), torch.tensor([[True, False, False, False]] * 3))


def test_masked_text_is_never_seen() -> None:
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


def test_modulation_of_a_frame_is_its_own() -> None:
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
