"""Prompts: cleaned, scored, encoded.

The expected cleaned prompts were produced by the PixArt-Sigma pipeline of diffusers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ertacache.models.opensora import add_scores, clean_prompt
from ertacache.models.opensora.prompts import EncodedText, encode_text
from tests.integration.tiny import t5, tokenizer

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


def test_cleaning_does_not_change_an_ordinary_prompt() -> None:
    prompt = "a small red apple on a blue background, moving left."
    assert clean_prompt(prompt) == prompt


def test_scores_survive_cleaning() -> None:
    scored = add_scores("a cat", aesthetic=6.5, motion=5, camera="pan left")
    assert clean_prompt(scored) == scored
    assert scored == "a cat aesthetic score: 6.5. motion score: 5.0. camera motion: pan left."


def test_score_in_the_prompt_is_kept() -> None:
    prompt = "a cat. aesthetic score: 4.0."
    assert add_scores(prompt, aesthetic=6.5) == prompt
    assert add_scores(prompt) == prompt


def encode(prompts: str | list[str], **changes: Any) -> EncodedText:
    tokens = tokenizer()
    options = {"max_length": 8, "clean": True, "device": torch.device("cpu")} | changes
    with torch.no_grad():
        return encode_text(prompts, tokens, t5(tokens), **options)


def test_short_prompt_is_encoded_as_if_it_were_alone() -> None:
    both = encode(["a red circle", "a red circle moving left"])
    alone = encode("a red circle")
    assert both.mask.sum(1).tolist() == [4, 6]  # with the end token
    torch.testing.assert_close(both.embeds[0, :4], alone.embeds[0])


def test_long_prompt_is_truncated() -> None:
    text = encode("a red circle moving left on black", max_length=4)
    assert text.embeds.shape[1] == 4


def test_cleaning_is_optional() -> None:
    marked = encode("a <b>red</b> circle")
    assert torch.equal(marked.embeds, encode("a red circle").embeds)
    assert encode("a <b>red</b> circle", clean=False).embeds.shape != marked.embeds.shape


def test_given_embeddings() -> None:
    embeds = torch.randn(2, 3, 4)
    assert EncodedText.of(embeds, None).mask.tolist() == [[1, 1, 1]] * 2
    mask = torch.tensor([[1, 1, 0]] * 2)
    assert EncodedText.of(embeds, mask).mask is mask
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\), but its mask \(2, 4\)"):
        EncodedText.of(embeds, torch.ones(2, 4))
    with pytest.raises(ValueError, match="hides a whole prompt"):
        EncodedText.of(embeds, torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_repeating_keeps_videos_of_a_prompt_together() -> None:
    text = EncodedText.of(torch.arange(2.0).view(2, 1, 1), None).repeat(2)
    assert text.embeds.flatten().tolist() == [0, 0, 1, 1]
    assert len(text) == 4
