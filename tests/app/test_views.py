"""What is shown of results and policies: their numbers, and nothing that runs."""

from __future__ import annotations

import base64
import io
import re

import pytest
import torch
from PIL import Image

from ertacache.app.outcomes import Outcome, Prediction
from ertacache.app.views import prediction_html, result_html, show_figure, show_table
from ertacache.formats.policy import ValidationRow

ROW = ValidationRow("policy", 15, psnr=40.0, speedup=1.9, prompts=24)
BLACK, GREY = torch.zeros(3, 2, 4), torch.full((3, 2, 4), 0.1)


def outcome(**changes: object) -> Outcome:
    values = {
        "full": BLACK,
        "accelerated": GREY,
        "full_seconds": 3.0,
        "seconds": 1.0,
        "compute_steps": (0, 2),
        "num_steps": 4,
        "scores": {"PSNR": 20.0, "SSIM": 0.5, "LPIPS": "no <weights>"},
        "notes": ("a < b",),
    }
    return Outcome(**(values | changes))  # type: ignore[arg-type]


def test_images_are_the_results_themselves() -> None:
    shown = result_html(outcome())
    images = [
        Image.open(io.BytesIO(base64.b64decode(data)))
        for data in re.findall(r"data:image/png;base64,([^\"]+)", shown)
    ]
    assert [image.size for image in images] == [(4, 2)] * 3
    assert [image.getpixel((0, 0))[0] for image in images] == [0, 26, 204]  # 8 times the difference


def test_numbers_are_shown_and_words_are_escaped() -> None:
    shown = result_html(outcome())
    for words in ("20.0 dB", "0.5000", "3.00 s", "1.00 s", "3.00x", "2 of 4 steps computed"):
        assert words in shown
    assert "LPIPS is not available: no &lt;weights&gt;" in shown
    assert "a &lt; b" in shown
    assert result_html(outcome(), '/x"onerror=').count("/x&quot;onerror=") == 1


def test_identical_results_and_broken_ones() -> None:
    same = outcome(accelerated=BLACK, scores={"PSNR": float("inf")})
    assert "identical" in result_html(same)
    broken = outcome(accelerated=torch.full((3, 2, 4), torch.nan), scores={"PSNR": 0.0})
    assert "erta-compare" in result_html(broken)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Prediction(15, 30, 41.25), "a mean over prompts"),
        (Prediction(15, 30, 41.25, measured=ROW), "24 held-out prompts: <b>40.0 dB</b>"),
        (Prediction(30, 30, float("inf")), "<b>identical</b>"),
        (Prediction(15, 30, why="a job <is> running"), "a job &lt;is&gt; running"),
        (Prediction(15, 30, why="no policy", ready=False), "<b>15 of 30</b>"),
    ],
)
def test_predictions(found: Prediction, words: str) -> None:
    assert words in prediction_html(found)


def test_figures_and_tables_can_be_scrolled_by_keyboard() -> None:
    assert 'tabindex="0"' in show_figure("<svg/>", "a figure")
    assert 'tabindex="0"' in show_table(["<a>"], [["1"]], label="one")
    assert "&lt;a&gt;" in show_table(["<a>"], [], label="one")
