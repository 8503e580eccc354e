"""The benchmarks as modules, and tiny pipelines in the place of the bundled models."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ertacache.models import Model
from tests.integration.tiny import CASES, STEPS

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
EXTRA = {"max_sequence_length": 8}
SHAPES = [f"{colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")]
PROMPTS = {
    "calibration": [f"a {shape}" for shape in SHAPES],
    "heldout": [f"a small {shape}" for shape in SHAPES],
}
TINY = {
    "flux": Model("flux", "FluxPipeline", STEPS, 3.5, (32, 32), extra=EXTRA),
    "wan": Model("wan", "WanPipeline", 6, 5.0, (32, 32), num_frames=9, extra=EXTRA),
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Import a benchmark by name, as its command does, with tiny models."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(import_module("policies"), "FOLDER", tmp_path / "policies")

    def load(name: str) -> Any:
        module = import_module(name)
        for place in (module, import_module("rows")):
            monkeypatch.setattr(place, "MODELS", TINY)
        monkeypatch.setattr(module, "load_pipeline", lambda model: CASES[model].build())
        monkeypatch.setattr(module, "load_prompts", lambda model, split: PROMPTS[split])
        return module

    return load
