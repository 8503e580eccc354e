"""Prompts as the network takes them: encoded, beside what stands for no prompt.

Knows nothing of guidance scales, networks or videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ertacache.models.opensora.prompts import clean_prompt

__all__ = ["EncodedText", "Prompts", "encode_text"]

Prompts = str | Sequence[str]
"""One prompt or several."""


@dataclass(frozen=True)
class EncodedText:
    """Encoded texts of one batch.

    Attributes:
        embeds: shape (batch, tokens, channels).
        mask: shape (batch, tokens), 1 where there is text.
    """

    embeds: Tensor
    mask: Tensor

    @classmethod
    def of(cls, embeds: Tensor, mask: Tensor | None) -> EncodedText:
        """Return texts that are encoded already; without a mask, all of it is text."""
        if mask is None:
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        if mask.shape != embeds.shape[:2]:
            raise ValueError(
                f"the text has shape {tuple(embeds.shape)}, but its mask {tuple(mask.shape)}"
            )
        if not bool((mask != 0).any(dim=1).all()):
            raise ValueError("the mask hides a whole text: leave at least its last token")
        return cls(embeds, mask)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.embeds)

    def lengthen(self, tokens: int) -> EncodedText:
        """Fill up with zeros that the mask hides."""
        missing = tokens - self.embeds.shape[1]
        return EncodedText(F.pad(self.embeds, (0, 0, 0, missing)), F.pad(self.mask, (0, missing)))

    def join(self, other: EncodedText) -> EncodedText:
        """Return both batches as one, this one first.

        Example:
            >>> one = EncodedText(torch.zeros(1, 2, 3), torch.ones(1, 2))
            >>> two = EncodedText(torch.zeros(1, 4, 3), torch.ones(1, 4))
            >>> one.join(two).mask
            tensor([[1., 1., 0., 0.],
                    [1., 1., 1., 1.]])
        """
        tokens = max(self.embeds.shape[1], other.embeds.shape[1])
        mine, theirs = self.lengthen(tokens), other.lengthen(tokens)
        embeds = torch.cat([mine.embeds, theirs.embeds.to(mine.embeds)])
        return EncodedText(embeds, torch.cat([mine.mask, theirs.mask.to(mine.mask)]))

    def repeat(self, times: int) -> EncodedText:
        """Repeat each text."""
        return EncodedText(
            self.embeds.repeat_interleave(times, dim=0), self.mask.repeat_interleave(times, dim=0)
        )


def encode_text(
    prompts: Prompts,
    tokenizer: Any,
    text_encoder: Any,
    *,
    max_length: int,
    clean: bool,
    device: torch.device,
) -> EncodedText:
    """Encode prompts; what is longer than ``max_length`` tokens is cut off.

    Args:
        prompts: one text or several.
        tokenizer: a T5 tokenizer.
        text_encoder: its encoder.
        max_length: the most tokens that the network knows.
        clean: whether to clean them as the captions of the training were.
        device: where the encoder is.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    tokens = tokenizer(
        [clean_prompt(text) for text in texts] if clean else texts,
        padding="longest",  # padding is hidden from both networks, so there is no need for more
        max_length=max_length,
        truncation=True,
        return_tensors="pt",
    )
    ids, mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)
    return EncodedText(text_encoder(ids, attention_mask=mask)[0], mask)
