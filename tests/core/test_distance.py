"""Distances to the full run over prompts, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ertacache.core.distance import distances, robust_distance, typical_distance


def test_every_prompt_has_its_root_mean_square_distance() -> None:
    reached = torch.tensor([[[3.0, 4.0]], [[30.0, 40.0]]], dtype=torch.bfloat16)
    found = distances(reached, torch.zeros(2, 1, 2))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([math.sqrt(12.5), 10 * math.sqrt(12.5)])


def test_the_typical_distance_is_a_geometric_mean_and_never_0() -> None:
    assert typical_distance(torch.tensor([2.0, 8.0])) == pytest.approx(4.0)
    assert 0 < typical_distance(torch.zeros(3)) < 1e-150


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([4.0], 4.0),
        ([1.0, 1.0, 1.0, 16.0], math.sqrt(2.0 * 16.0)),  # a tenth of few prompts is one
        ([1.0] * 18 + [4.0, 16.0], math.sqrt(2.0 ** (6 / 20) * 8.0)),  # and of twenty, two
    ],
)
def test_the_worst_tenth_counts_as_much_as_all(found: list[float], expected: float) -> None:
    assert robust_distance(torch.tensor(found)) == pytest.approx(expected)


def test_one_prompt_that_diverges_outweighs_a_gain_on_the_others() -> None:
    steady, diverging = torch.ones(20), torch.full((20,), 0.8)
    diverging[3] = 20.0
    assert typical_distance(diverging) < typical_distance(steady)
    assert robust_distance(diverging) > robust_distance(steady)
