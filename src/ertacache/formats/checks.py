"""Checks of single values, each with a sentence that says what is wrong; and the error they raise.

Knows no file and no dataclass: the name of the checked thing is given by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from torch import Tensor

__all__ = [
    "FormatError",
    "check_count",
    "check_number",
    "check_sigmas",
    "check_tensor",
    "check_text",
    "check_texts",
    "raising",
]

MAX_INTEGER = (1 << 63) - 1
MAX_STEPS = 10_000
MAX_DIMENSIONS = 8
MAX_MESSAGE = 400  # characters: a damaged file must not pour its content over the terminal


class FormatError(ValueError):
    """A profile or a policy, in memory or in a file, is not valid."""


@contextmanager
def raising(error: type[FormatError], prefix: str = "") -> Iterator[None]:
    """Turn whatever a bad file or value can raise into one ``error``.

    Example:
        >>> with raising(FormatError, "cannot load 'a': "):
        ...     raise OSError(2, "No such file or directory")
        Traceback (most recent call last):
        ertacache.formats.checks.FormatError: cannot load 'a': No such file or directory
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


def check_text(name: str, value: object, *, empty: bool = False) -> str:
    """Return ``value`` if it is a text that UTF-8 can hold.

    Example:
        >>> check_text("dtype", "bfloat16")
        'bfloat16'
    """
    if not isinstance(value, str):
        raise FormatError(f"{name} must be a text, got {type(value).__name__}")
    if not (value or empty):
        raise FormatError(f"{name} must not be empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"{name} holds half of a surrogate pair, not a character") from None
    return value


def check_texts(name: str, value: object) -> dict[str, str]:
    """Return a sorted copy of ``value`` if it maps texts to texts.

    Example:
        >>> check_texts("versions", {"torch": "2.9.1", "diffusers": "0.42.1"})
        {'diffusers': '0.42.1', 'torch': '2.9.1'}
    """
    if not isinstance(value, Mapping):
        raise FormatError(f"{name} must be a mapping, got {type(value).__name__}")
    for key, text in value.items():
        check_text(f"a key of {name}", key)
        check_text(f"{name}.{key[:40]}", text, empty=True)
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
        ertacache.formats.checks.FormatError: nominal must have shape (3, 2), got (3,)
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
    """Return ``value`` if it is a strictly descending table of ``num_steps + 1`` sigmas.

    Example:
        >>> check_sigmas(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), num_steps=2)
        Traceback (most recent call last):
        ertacache.formats.checks.FormatError: sigmas must descend at every step, but entry 1 does \
not
    """
    sigmas = check_tensor("sigmas", value, shape=(num_steps + 1,))
    rising = sigmas.diff() >= 0
    if bool(rising.any()):
        place = int(rising.nonzero()[0]) + 1
        raise FormatError(f"sigmas must descend at every step, but entry {place} does not")
    return sigmas
