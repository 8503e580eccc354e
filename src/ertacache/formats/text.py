"""How values are written for people: messages on one line, PSNRs. Loads nothing."""

from __future__ import annotations

import math

__all__ = ["decibels", "one_line"]

MAX_MESSAGE = 600  # characters


def one_line(message: object) -> str:
    r"""A message on one line, short and without control characters.

    Example:
        >>> one_line("no such\n  file: \x1b[31m")
        'no such file: \\x1b[31m'
    """
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " ..."


def decibels(value: float) -> str:
    """A PSNR as it is printed.

    Example:
        >>> decibels(44.79), decibels(float("inf"))
        ('44.8 dB', 'identical')
    """
    return "identical" if math.isinf(value) else f"{value:.1f} dB"
