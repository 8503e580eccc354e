"""One thread per test process: on a busy machine, threads that wait for each other cost minutes."""

from __future__ import annotations

import os

# Before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
