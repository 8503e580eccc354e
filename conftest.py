"""What a test computes must not depend on the machine, or on what else runs on it."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Before torch is imported; processes that tests start inherit both. One thread per process: on a
# busy machine, threads that wait for each other cost minutes. No tile instructions (AMX): virtual
# machines may announce them and then end a process that multiplies bfloat16.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# The page of the app needs an extra that not every environment has.
collect_ignore = (
    [] if find_spec("gradio") else [f"src/ertacache/app/{name}.py" for name in ("page", "server")]
)
