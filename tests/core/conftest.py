from __future__ import annotations

import pytest

from tests.core.rings import Bench, bench


@pytest.fixture(scope="session")
def mild() -> Bench:
    """Radius 2, width 0.3, 30 steps."""
    return bench(2.0, 0.3, 30)
