from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def comfytables(benchmark_module: Any) -> Any:
    return benchmark_module("comfytables")
