"""JSON without surprises: one text per value on the way out, nothing but exact JSON on the way in.

Knows neither the files nor what their fields mean. Everything it refuses is a ``ValueError``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["canonical", "parse_object", "take_list", "take_record"]

MAX_DIGITS = 20  # no 64-bit integer is longer; Python would happily build one of a million digits


def canonical(value: object) -> str:
    """Return the one JSON text of ``value``: sorted keys, no blanks, ASCII, finite numbers.

    Example:
        >>> canonical({"b": [1, 2.5], "a": None})
        '{"a":null,"b":[1,2.5]}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``; ``what`` names it in the error.

    Example:
        >>> parse_object(b'{"a": 1, "a": 2}', "the header")
        Traceback (most recent call last):
        ValueError: the header is not valid JSON (the key 'a' stands there twice)
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_int=_integer,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(f"{what} is not valid JSON (nested too deeply)") from None
    except ValueError as cause:  # also UnicodeDecodeError and JSONDecodeError
        raise ValueError(f"{what} is not valid JSON ({cause})") from None
    if type(value) is not dict:
        raise ValueError(f"{what} must be a JSON object, got {_kind(value)}")
    return value


def take_record(value: object, types: Mapping[str, tuple[type, ...]], what: str) -> dict[str, Any]:
    """Return ``value`` if it is an object with exactly the keys and value types of ``types``.

    Types are compared exactly, so that true is not an integer.

    Example:
        >>> take_record({"seed": True}, {"seed": (int,)}, "prompts[0]")
        Traceback (most recent call last):
        ValueError: prompts[0].seed must be an integer, got a truth value
    """
    if type(value) is not dict:
        raise ValueError(f"{what} must be an object, got {_kind(value)}")
    for key in value:
        if key not in types:
            raise ValueError(f"{what} has an unknown key {key[:40]!r}")
    for key, allowed in types.items():
        if key not in value:
            raise ValueError(f"{what} lacks the key {key!r}")
        if type(value[key]) not in allowed:
            wanted = " or ".join(_KINDS[t] for t in allowed)
            raise ValueError(f"{what}.{key} must be {wanted}, got {_kind(value[key])}")
    return value


def take_list(value: list[Any], item: type, what: str) -> list[Any]:
    """Return ``value`` if every item is exactly of the type ``item``.

    Example:
        >>> take_list([0, 2.0], int, "compute_steps")
        Traceback (most recent call last):
        ValueError: compute_steps[1] must be an integer, got a number
    """
    for place, entry in enumerate(value):
        if type(entry) is not item:
            raise ValueError(f"{what}[{place}] must be {_KINDS[item]}, got {_kind(entry)}")
    return value


_KINDS: dict[type, str] = {
    bool: "a truth value",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a text",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:40]!r} stands there twice")
    return record


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
