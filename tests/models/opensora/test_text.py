from __future__ import annotations

from typing import Any

import pytest
import torch

from ertacache.models.opensora.text import EncodedText, encode_text
from tests.integration.tiny import t5, tokenizer


def encode(prompts: str | list[str], **changes: Any) -> EncodedText:
    words = tokenizer()
    options = {"max_length": 8, "clean": True, "device": torch.device("cpu")} | changes
    with torch.no_grad():
        return encode_text(prompts, words, t5(words), **options)


def test_short_prompt_is_encoded_as_if_it_were_alone() -> None:
    both = encode(["a red circle", "a red circle moving left"])
    alone = encode("a red circle")
    assert both.mask.sum(1).tolist() == [4, 6]  # with the mark of the end
    torch.testing.assert_close(both.embeds[0, :4], alone.embeds[0])


def test_long_prompt_is_cut_off_before_its_end() -> None:
    text = encode("a red circle moving left on black", max_length=4)
    assert text.embeds.shape[1] == 4


def test_cleaning_can_be_left_out() -> None:
    marked = encode("a <b>red</b> circle")
    assert torch.equal(marked.embeds, encode("a red circle").embeds)
    assert encode("a <b>red</b> circle", clean=False).embeds.shape != marked.embeds.shape


def test_texts_that_are_encoded_already() -> None:
    embeds = torch.randn(2, 3, 4)
    assert EncodedText.of(embeds, None).mask.tolist() == [[1, 1, 1]] * 2
    mask = torch.tensor([[1, 1, 0]] * 2)
    assert EncodedText.of(embeds, mask).mask is mask
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\), but its mask \(2, 4\)"):
        EncodedText.of(embeds, torch.ones(2, 4))
    with pytest.raises(ValueError, match="hides a whole text"):
        EncodedText.of(embeds, torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_repeating_keeps_videos_of_a_prompt_together() -> None:
    text = EncodedText.of(torch.arange(2.0).view(2, 1, 1), None).repeat(2)
    assert text.embeds.flatten().tolist() == [0, 0, 1, 1]
    assert len(text) == 4
