"""One thread per test process: on a busy machine, threads that wait for each other cost minutes."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The page of the app needs an extra that not every environment has.
collect_ignore = (
    [] if find_spec("gradio") else [f"src/ertacache/app/{name}.py" for name in ("page", "server")]
)
