"""Images and videos in the page: their pixels, their size, and which belong together."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ertacache.metrics.image import to_image
from ertacache.report.films import LONGEST_SIDE, compared_pairs, film, pairs_html, samples_html


def noise(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).byte()


def stored(html: str) -> Image.Image:
    source = re.search(r"data:image/webp;base64,([^\"]+)", html)
    assert source is not None
    return Image.open(io.BytesIO(base64.b64decode(source[1])))


def test_small_frames_are_kept_pixel_by_pixel_below_one_another() -> None:
    video = noise(5, 3, 8, 12)
    html = film(video, "x")
    assert "--frames:5;" in html
    assert "aspect-ratio:12/8" in html
    pixels = torch.from_numpy(np.array(stored(html).convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(pixels.reshape(3, 5, 8, 12).transpose(0, 1), video)


def test_long_and_large_ones_are_made_smaller() -> None:
    long = stored(film(noise(1, 3, 8, 8).expand(2500, 3, 8, 8), "x"))
    assert long.height <= LONGEST_SIDE
    large = stored(film(noise(3, 700, 1400), "x"))
    assert large.size == (640, 320)


def test_text_is_escaped() -> None:
    assert 'alt="&lt;b&gt; &quot;"' in film(noise(3, 8, 8), '<b> "')


def test_samples_name_their_full_run() -> None:
    found = {(name, 2.0): noise(2, 3, 8, 8) for name in ("a", "b")} | {
        ("full", 1.0): noise(2, 3, 8, 8)
    }
    keys = [("full", 1.0), ("b", 2.0), ("absent", 2.0), ("a", 2.0)]
    html = samples_html("t", ["one", "<two>"], found, keys, name="n")
    assert re.findall(r'id="(n-\d)"', html) == ["n-0", "n-1"]
    assert re.findall(r'data-full="(n-\d)"', html) == ["n-0", "n-1"] * 2
    assert re.findall(r'<th scope="row">(\w+)', html) == ["full", "b", "a"]
    assert "&lt;two&gt;" in html
    assert samples_html("t", ["one"], found, [("absent", 2.0)], name="n") == ""


def test_pairs_of_a_folder(tmp_path: Path) -> None:
    pixels = noise(3, 8, 8) / 255
    for name in ("000-a.png", "000-a-full.png", "000-a-compare.png", "alone.png"):
        to_image(pixels).save(tmp_path / name)
    pairs = compared_pairs(tmp_path)
    assert [(title, full.name, fast.name) for title, full, fast in pairs] == [
        ("000-a", "000-a-full.png", "000-a.png")
    ]
    (html,) = pairs_html(pairs, name="n")
    assert "<figcaption>000-a: identical" in html
    assert html.index('id="n-0"') < html.index('data-full="n-0"')


def test_pairs_that_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make them with ertacache generate --compare"):
        compared_pairs(tmp_path)
    to_image(noise(3, 8, 8) / 255).save(tmp_path / "a.png")
    to_image(noise(3, 8, 9) / 255).save(tmp_path / "a-full.png")
    with pytest.raises(ValueError, match="differ in size or length"):
        list(pairs_html(compared_pairs(tmp_path), name="n"))
