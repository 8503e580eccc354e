"""Policies as text and image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ertacache
from ertacache import Policy
from ertacache.core.flows import GaussianRing
from ertacache.integration.loops import Loop
from tests.comfyui.stand_ins import load_pack


@pytest.fixture(scope="module")
def policy() -> Policy:
    ring = GaussianRing(radius=2.0, width=0.3)
    loop = Loop(lambda prompt: ring.velocity, torch.linspace(1, 0, 9), (16, 2))
    return ertacache.calibrate(loop, ["a", "b", "c", "d"], speedup=2)


@pytest.fixture
def info(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return load_pack(monkeypatch, tmp_path).info


def test_a_line_for_every_number_of_computed_steps(info: Any, policy: Policy) -> None:
    lines = info.describe(policy).splitlines()
    rows = lines[lines.index("computed  fewer  predicted  measured PSNR to the full run") + 1 :]
    assert [int(line.split()[0]) for line in rows] == list(range(2, 9))
    assert rows[2].split()[-1] == "dB"
    assert rows[2].count("dB") == 2  # of 4 steps, which were refitted, also what was measured
    assert rows[0].count("dB") == 1


def colours(image: torch.Tensor) -> set[tuple[int, ...]]:
    pixels = (255 * image).round().int().view(-1, 3)
    return {tuple(pixel) for pixel in pixels.unique(dim=0).tolist()}


def test_the_image_has_a_curve_points_and_strips(info: Any, policy: Policy) -> None:
    image = info.draw(policy)
    assert image.shape == (1, 640, 960, 3)
    computed, reused, measured = (0, 114, 178), (229, 229, 229), (213, 94, 0)
    assert {computed, reused, measured} <= colours(image)
    strips = info.draw(replace(policy, profile=None, frontier=(), fits=(), response=()))
    assert {computed, reused} <= colours(strips)
    assert measured not in colours(strips)
