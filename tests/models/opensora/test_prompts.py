"""Cleaning; the expected texts were made by diffusers, with its PixArt-Sigma pipeline."""

from __future__ import annotations

import pytest

from ertacache.models.opensora import add_scores, clean_prompt

CASES = {
    "A drone flies over a Coastal cliff.": "a drone flies over a coastal cliff.",
    "a <b>bold</b> move — of 3 cats… “hello”": 'a bold move - of 3 cats… "hello"',
    "see https://www.foo.com/bar now": "see now",
    "call @john #123 1234567 at 192.168.0.1": "call at",
    "this-is-my-cute-cat_photo": "this is my cute cat photo",
    "well-known two-fold": "well-known two-fold",
    "free shipping download free, page 12": "",
    "800x600 jc6640 j2d1a2a shop": "shop",
    "AT&amp;T &lt;b&gt;": "at t",
    "'quoted text'": "quoted text",
    "中文 text 漢字": "text",
    "wow!!! ***SALE*** (x) [y] {z} | a/b": "wow!!! sale x y z a b",
    "50% off%20now": "50% off now",
    "<person> walks": "person walks",
    "a,b and c.d": "a, b and c. d",
}


@pytest.mark.parametrize("prompt", CASES)
def test_cleaning(prompt: str) -> None:
    assert clean_prompt(prompt) == CASES[prompt]


def test_cleaning_leaves_an_ordinary_prompt_alone() -> None:
    prompt = "a small red apple on a blue background, moving left."
    assert clean_prompt(prompt) == prompt


def test_scores_survive_cleaning() -> None:
    scored = add_scores("a cat", aesthetic=6.5, motion=5, camera="pan left")
    assert clean_prompt(scored) == scored
    assert scored == "a cat aesthetic score: 6.5. motion score: 5.0. camera motion: pan left."


def test_score_that_is_there_stays() -> None:
    prompt = "a cat. aesthetic score: 4.0."
    assert add_scores(prompt, aesthetic=6.5) == prompt
    assert add_scores(prompt) == prompt
