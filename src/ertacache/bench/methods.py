"""The methods of the benchmark: their names in tables and results files, their identifiers.

An identifier is what the command line takes; it is derived from the name. Importing this module
loads nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

__all__ = ["IDENTIFIERS", "METHODS", "identifier", "parse_methods"]

METHODS = (
    "trajectory",
    "paper",
    "paper, no timesteps",
    "paper, policy only",
    "our schedule, order 0",
    "our schedule, order 1",
    "our schedule, order 2",
    "fewer steps",
    "uniform",
    "extrapolation, order 1",
    "extrapolation, order 2",
    "TeaCache",
    "ertacache-paper (features)",
    "Delta-DiT",
    "ProfilingDiT",
    "T-GATE",
    "PAB",
    "FasterCache",
    "FirstBlockCache",
    "MagCache",
    "TaylorSeer",
    "SeaCache",
    "DBCache",
    "DBCache + TaylorSeer",
    "DBCache + DMD",
    "DBCache + FoCa",
    "Spectrum",
    "Spectrum, on outputs",
    "MeanCache",
    "EasyCache",
)
"""Every method by its name, in the order of the tables; results files have it, so it stays."""


def identifier(name: str) -> str:
    """The identifier of a method: lower case, with hyphens between words.

    Example:
        >>> identifier("paper, no timesteps"), identifier("DBCache + TaylorSeer")
        ('paper-no-timesteps', 'dbcache-taylorseer')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


IDENTIFIERS: Mapping[str, str] = MappingProxyType({identifier(name): name for name in METHODS})
"""The name of every method by its identifier."""


def parse_methods(text: str) -> list[str]:
    """The names of methods that are given by their identifiers, separated by commas.

    A name itself is taken as well, unless it contains a comma.

    Example:
        >>> parse_methods("trajectory, Paper-No-Timesteps, fewer steps")
        ['trajectory', 'paper, no timesteps', 'fewer steps']
    """
    found = []
    for part in text.split(","):
        known = identifier(part)
        if not known:
            raise ValueError(f"methods are separated by single commas, got {text!r}")
        if known not in IDENTIFIERS:
            (nearest,) = get_close_matches(known, IDENTIFIERS, n=1, cutoff=0.0)
            raise ValueError(
                f"no such method: {part.strip()!r}; the nearest is {nearest}, and there are "
                f"{', '.join(IDENTIFIERS)}"
            )
        found.append(IDENTIFIERS[known])
    return list(dict.fromkeys(found))
