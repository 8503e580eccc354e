"""Prompts in the form that Open-Sora 1.2 was trained on: cleaned text, with optional scores.

Its captions went through the usual cleaning of web captions, which a prompt has to go through as
well: lower case, no markup, no addresses, no article codes. Broken encodings are not repaired.
Knows nothing of tokenizers.
"""

from __future__ import annotations

import html
import re
import unicodedata
from html.parser import HTMLParser
from urllib.parse import unquote_plus

__all__ = ["add_scores", "clean_prompt"]

_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DOMAINS = "com|co|ru|net|org|edu|gov|it"

# What is replaced, in this order, before and after entities such as &lt; are resolved.
_BEFORE = (
    (r"@\w+\b", ""),  # names
    ("[\u31c0-\u9fff]+", ""),  # Chinese and Japanese characters
    ("-+", "-"),
    ("[`´«»“”¨]", '"'),  # noqa: RUF001
    ("[‘’]", "'"),  # noqa: RUF001
    ("&quot;?|&amp", ""),
    (r"(?:\d{1,3}\.){3}\d{1,3}", " "),  # network addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b|#\d{5,}\b|\b\d{6,}\b", ""),  # numbers of articles
    (rf"\S+\.(?:{_FILES})", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_AFTER = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # codes of articles: jc6640
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
_ADDRESS = re.compile(
    r"\b(?:(?:https?|www):(?:/{1,3}|[a-z0-9%])"
    rf"|[a-z0-9.\-]+\.(?:{_DOMAINS})[\w/-]*\b/?(?!@))"
)


def clean_prompt(prompt: str) -> str:
    """Clean a prompt as the captions of the training were: twice.

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
    """Ask for a look, an amount of motion or a move of the camera, in the words of the training.

    The published configuration asks for ``aesthetic=6.5``. A score that the prompt names stays.

    Example:
        >>> add_scores("a red panda", aesthetic=6.5, camera="pan left")
        'a red panda aesthetic score: 6.5. camera motion: pan left.'
    """
    scores = {
        "aesthetic score:": None if aesthetic is None else f"{aesthetic:.1f}",
        "motion score:": None if motion is None else f"{motion:.1f}",
        "camera motion:": camera,
    }
    asked = [f"{k} {v}." for k, v in scores.items() if v is not None and k not in prompt]
    return " ".join([prompt, *asked])


def _clean(text: str) -> str:
    text = unquote_plus(text).strip().lower().replace("<person>", "person")
    text = _without_tags(_ADDRESS.sub("", _ADDRESS.sub("", text)))
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
