"""Strict JSON and checks of single values: what may stand in a file, and the error otherwise.

One JSON text per value on the way out, nothing but exact JSON on the way in. Knows neither the
files nor what their fields mean.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

__all__ = [
    "FormatError",
    "PolicyError",
    "canonical",
    "check_count",
    "check_number",
    "check_sigmas",
    "check_string",
    "check_strings",
    "check_tensor",
    "parse_object",
    "raising",
    "take_list",
    "take_record",
]

MAX_DIGITS = 20  # no 64-bit integer is longer; Python would happily build one of a million digits
MAX_INTEGER = (1 << 63) - 1
MAX_STEPS = 10_000
MAX_PROMPTS = 10_000
MAX_DIMENSIONS = 8
MAX_MESSAGE = 400  # characters: a damaged file must not flood the terminal


class FormatError(ValueError):
    """A part of a file is not valid."""


class PolicyError(FormatError):
    """A policy is not valid, its file cannot be read or written, or it does not fit a pipeline."""


@contextmanager
def raising(error: type[FormatError], prefix: str = "") -> Iterator[None]:
    """Turn whatever a bad file or value can raise into one ``error``.

    Example:
        >>> with raising(FormatError, "cannot load 'a': "):
        ...     raise OSError(2, "No such file or directory")
        Traceback (most recent call last):
        ertacache.formats.schema.FormatError: cannot load 'a': No such file or directory
    """
    try:
        yield
    except OSError as cause:
        raise error(prefix + (cause.strerror or str(cause))) from cause
    except RecursionError as cause:
        raise error(prefix + "its header is nested too deeply") from cause
    except (ValueError, OverflowError, SafetensorError) as cause:
        if type(cause) is error and not prefix:
            raise
        reason = str(cause)
        if len(reason) > MAX_MESSAGE:
            reason = reason[:MAX_MESSAGE] + " ..."
        raise error(prefix + reason) from cause


def check_string(name: str, value: object, *, empty: bool = False) -> str:
    """Return ``value`` if it is a string that UTF-8 can encode.

    Example:
        >>> check_string("dtype", "bfloat16")
        'bfloat16'
    """
    if not isinstance(value, str):
        raise FormatError(f"{name} must be a string, got {type(value).__name__}")
    if not (value or empty):
        raise FormatError(f"{name} must not be empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"{name} holds a lone surrogate, which is not a character") from None
    return value


def check_strings(name: str, value: object) -> dict[str, str]:
    """Return a sorted copy of ``value`` if it maps strings to strings.

    Example:
        >>> check_strings("versions", {"torch": "2.9.1", "diffusers": "0.42.1"})
        {'diffusers': '0.42.1', 'torch': '2.9.1'}
    """
    if not isinstance(value, Mapping):
        raise FormatError(f"{name} must be a mapping, got {type(value).__name__}")
    for key, text in value.items():
        check_string(f"a key of {name}", key)
        check_string(f"{name}.{key[:40]}", text, empty=True)
    return dict(sorted(value.items()))


def check_count(name: str, value: object, *, low: int = 0, high: int = MAX_INTEGER) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high``.

    Example:
        >>> check_count("seed", 7)
        7
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{name} must be an integer, got {type(value).__name__}")
    if not low <= value <= high:
        raise FormatError(f"{name} must be from {low} to {high}, got {value}")
    return int(value)


def check_number(name: str, value: object, *, low: float = -math.inf) -> float:
    """Return ``value`` as a float if it is a finite number, at least ``low``.

    Example:
        >>> check_number("guidance", 3)
        3.0
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise FormatError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise FormatError(f"{name} must be finite, got {number}")
    if number < low:
        raise FormatError(f"{name} must be at least {low:g}, got {number:g}")
    return number


def check_tensor(name: str, value: object, *, shape: tuple[int, ...]) -> Tensor:
    """Return ``value`` if it is a float64 tensor of ``shape`` without NaN or infinity.

    Example:
        >>> check_tensor("nominal", torch.zeros(3), shape=(3, 2))
        Traceback (most recent call last):
        ertacache.formats.schema.FormatError: nominal must have shape (3, 2), got (3,)
    """
    if not isinstance(value, Tensor):
        raise FormatError(f"{name} must be a tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise FormatError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.dtype != torch.float64:
        raise FormatError(f"{name} must be float64, got {str(value.dtype).split('.')[-1]}")
    if not bool(torch.isfinite(value).all()):
        raise FormatError(f"{name} holds a number that is not finite")
    return value


def check_sigmas(value: object, *, num_steps: int) -> Tensor:
    """Return ``value`` if it is a strictly descending sigma schedule of ``num_steps + 1`` entries.

    Example:
        >>> check_sigmas(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), num_steps=2)
        Traceback (most recent call last):
        ertacache.formats.schema.FormatError: sigmas must descend at every step, but entry 1 does \
not
    """
    sigmas = check_tensor("sigmas", value, shape=(num_steps + 1,))
    rising = sigmas.diff() >= 0
    if bool(rising.any()):
        place = int(rising.nonzero()[0]) + 1
        raise FormatError(f"sigmas must descend at every step, but entry {place} does not")
    return sigmas


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
        ValueError: the header is not valid JSON (the key 'a' is repeated)
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
        ValueError: prompts[0].seed must be an integer, got a boolean
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
    bool: "a boolean",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a string",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:40]!r} is repeated")
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
