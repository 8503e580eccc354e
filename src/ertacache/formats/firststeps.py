"""With which step each of several networks begins, kept among the texts of a profile or policy.

What one expert said must not be reused for another, so solving pins these steps. A text, and not a
field of the formats: a file without it says nothing of networks. Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["FIRST_STEPS", "note_first_steps", "read_first_steps"]

FIRST_STEPS = "first steps of networks"
"""Name of the text in ``provenance``."""


def note_first_steps(steps: Iterable[int]) -> dict[str, str]:
    """Return the text for these steps, by its name; none if all networks begin with step 0.

    Example:
        >>> note_first_steps([0, 4])
        {'first steps of networks': '0 4'}
        >>> note_first_steps([0])
        {}
    """
    found = sorted({0, *steps})
    return {FIRST_STEPS: " ".join(map(str, found))} if len(found) > 1 else {}


def read_first_steps(texts: Mapping[str, str]) -> tuple[int, ...]:
    r"""Return the steps that a ``provenance`` tells of, those of all its lines together.

    Example:
        >>> read_first_steps({"first steps of networks": "0 4\n0 5"})
        (0, 4, 5)
        >>> read_first_steps({})
        ()
    """
    words = texts.get(FIRST_STEPS, "").split()
    return tuple(sorted({int(word) for word in words if word.isascii() and word.isdigit()}))
