"""Prompts of Open-Sora 1.2: cleaned, scored, and encoded for the network.

The captions of its training went through the usual cleaning of web captions, so a prompt has to go
through it as well: lower case, no markup, no URLs, no article codes. Broken encodings are not
repaired.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["EncodedText", "Prompts", "add_scores", "clean_prompt", "encode_text"]

Prompts = str | Sequence[str]
"""One prompt or several."""

_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DOMAINS = "com|co|ru|net|org|edu|gov|it"

# Replacements in this order, before and after entities such as &lt; are resolved.
_BEFORE = (
    (r"@\w+\b", ""),  # user names
    ("[\u31c0-\u9fff]+", ""),  # Chinese and Japanese characters
    ("-+", "-"),
    ("[`´«»“”¨]", '"'),  # noqa: RUF001
    ("[‘’]", "'"),  # noqa: RUF001
    ("&quot;?|&amp", ""),
    (r"(?:\d{1,3}\.){3}\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b|#\d{5,}\b|\b\d{6,}\b", ""),  # article numbers
    (rf"\S+\.(?:{_FILES})", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_AFTER = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article codes: jc6640
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),  # jc6640vc
    (r"\b\d+[a-zA-Z]+\d+\b", ""),  # 6640vc231
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),  # j2d1a2a
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # noqa: RUF001  sizes: 800x600
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)
_URL = re.compile(
    r"\b(?:(?:https?|www):(?:/{1,3}|[a-z0-9%])"
    rf"|[a-z0-9.\-]+\.(?:{_DOMAINS})[\w/-]*\b/?(?!@))"
)


def clean_prompt(prompt: str) -> str:
    """Clean a prompt like the captions of the training: twice.

    Example:
        >>> clean_prompt("A <b>Red Panda</b> in the snow — see https://www.pandas.com/red")
        'a red panda in the snow - see'
    """
    return _clean(_clean(prompt))


def add_scores(
    prompt: str,
    *,
    aesthetic: float | None = None,
    motion: float | None = None,
    camera: str | None = None,
) -> str:
    """Append scores for aesthetics, motion and camera in the format of the training captions.

    The published configuration uses ``aesthetic=6.5``. A score that is in the prompt is kept.

    Example:
        >>> add_scores("a red panda", aesthetic=6.5, camera="pan left")
        'a red panda aesthetic score: 6.5. camera motion: pan left.'
    """
    scores = {
        "aesthetic score:": None if aesthetic is None else f"{aesthetic:.1f}",
        "motion score:": None if motion is None else f"{motion:.1f}",
        "camera motion:": camera,
    }
    added = [f"{k} {v}." for k, v in scores.items() if v is not None and k not in prompt]
    return " ".join([prompt, *added])


def _clean(text: str) -> str:
    text = unquote_plus(text).strip().lower().replace("<person>", "person")
    text = _without_tags(_URL.sub("", _URL.sub("", text)))
    text = "".join("-" if unicodedata.category(c) == "Pd" else c for c in text)
    text = _replace(text, _BEFORE)
    if len(re.findall("[-_]", text)) > 3:  # this-is-the-name-of-a-file
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(unicodedata.normalize("NFC", text)))
    return _replace(text, _AFTER).strip()


def _replace(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _without_tags(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    parser.close()
    return "".join(parser.parts)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


@dataclass(frozen=True)
class EncodedText:
    """Encoded prompts of one batch.

    Attributes:
        embeds: shape (batch, tokens, channels).
        mask: shape (batch, tokens), 1 for tokens and 0 for padding.
    """

    embeds: Tensor
    mask: Tensor

    @classmethod
    def of(cls, embeds: Tensor, mask: Tensor | None) -> EncodedText:
        """Wrap given embeddings; without a mask, nothing is padding."""
        if mask is None:
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        if mask.shape != embeds.shape[:2]:
            raise ValueError(
                f"prompt_embeds has shape {tuple(embeds.shape)}, but its mask {tuple(mask.shape)}"
            )
        if not bool((mask != 0).any(dim=1).all()):
            raise ValueError("the mask hides a whole prompt: keep at least its last token")
        return cls(embeds, mask)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.embeds)

    def pad(self, tokens: int) -> EncodedText:
        """Pad with zeros to a number of tokens; the mask hides the padding."""
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
        mine, theirs = self.pad(tokens), other.pad(tokens)
        embeds = torch.cat([mine.embeds, theirs.embeds.to(mine.embeds)])
        return EncodedText(embeds, torch.cat([mine.mask, theirs.mask.to(mine.mask)]))

    def repeat(self, times: int) -> EncodedText:
        """Repeat each prompt."""
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
    """Encode prompts, truncated to ``max_length`` tokens.

    Args:
        prompts: one prompt or several.
        tokenizer: a T5 tokenizer.
        text_encoder: its encoder.
        max_length: maximal number of tokens.
        clean: whether to clean the prompts like the captions of the training.
        device: device of the encoder.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    tokens = tokenizer(
        [clean_prompt(text) for text in texts] if clean else texts,
        padding="longest",  # both networks mask it, so a fixed length is not needed
        max_length=max_length,
        truncation=True,
        return_tensors="pt",
    )
    ids, mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)
    return EncodedText(text_encoder(ids, attention_mask=mask)[0], mask)
