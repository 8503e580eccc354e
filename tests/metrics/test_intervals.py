from __future__ import annotations

import pytest
import torch

from ertacache.metrics import bootstrap_interval


def test_it_is_near_the_interval_of_the_normal_distribution() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = bootstrap_interval(values.tolist())
    mean, half = values.mean().item(), 1.96 * values.std().item() / 20
    assert low == pytest.approx(mean - half, abs=0.02)
    assert high == pytest.approx(mean + half, abs=0.02)
    assert bootstrap_interval(values.tolist()) == (low, high)
    narrow = bootstrap_interval(values.tolist(), level=0.5)
    assert low < narrow[0] < mean < narrow[1] < high


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="no value"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="between 0 and 1"):
        bootstrap_interval([1.0], level=95)
