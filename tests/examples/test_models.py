"""The examples of models from the hub, each on the bundled model that ``--tiny`` takes.

    ERTACACHE_PICTURES=1 pytest tests/examples/test_models.py

runs them as a user does, with all steps, and draws the before and after of ``examples/README.md``.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

import ertacache
from ertacache.metrics import psnr
from ertacache.metrics.image import to_image, to_pixels
from ertacache.report.grids import difference, grid, labelled_row

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = {
    "flux": "FluxPipeline",
    "wan": "WanPipeline",
    "cogvideox": "CogVideoXPipeline",
    "qwen_image": "QwenImagePipeline",
}
PICTURES = "ERTACACHE_PICTURES" in os.environ
FRAMES = [0, 4, 8, 12, 16]  # of a video that are drawn


@pytest.mark.parametrize("name", EXAMPLES)
def test_with_the_bundled_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {} if PICTURES else {"num_inference_steps": 4}
    if not PICTURES:  # the refit is tested elsewhere
        monkeypatch.setattr(ertacache, "calibrate", partial(ertacache.calibrate, refit=False))
    full, fast = import_module(f"examples.{name}").main(tmp_path, tiny=True, **steps)
    assert "2.00x fewer" in capsys.readouterr().out
    kind = "mp4" if isinstance(full, list | np.ndarray) else "png"
    names = ["fast." + kind, "full." + kind, "policy.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert np.shape(full) == np.shape(fast)
    if PICTURES and name != "qwen_image":  # which runs the same bundled model as flux
        draw(name, full, fast)


def draw(name: str, full: Any, fast: Any) -> None:
    """The full and the accelerated result, and eight times their difference."""
    before, after = to_pixels(full).float(), to_pixels(fast).float()
    found = psnr(after[None], before[None]).item()
    rows = [
        ("full run", before),
        (f"half of the evaluations, {found:.1f} dB", after),
        ("difference x 8", difference(after, before)),
    ]
    path = ROOT / "examples" / "images" / f"{name}.png"
    if before.ndim == 4:  # a video
        grid([(text, pixels[FRAMES]) for text, pixels in rows], scale=4).save(path)
        return
    wide = [(text, x.repeat_interleave(3, -1).repeat_interleave(3, -2)) for text, x in rows]
    to_image(labelled_row(wide)).save(path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_arguments_for_the_hub_are_those_of_the_pipeline(name: str) -> None:
    example = import_module(f"examples.{name}")
    pipeline = getattr(diffusers, EXAMPLES[name])
    assert set(example.CALL) <= set(inspect.signature(pipeline.__call__).parameters)
    assert example.MODEL.count("/") == 1
    assert len(example.PROMPTS.read_text().splitlines()) == 8
