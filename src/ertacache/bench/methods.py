"""The methods of the benchmark: their names in tables and results files, their identifiers.

An identifier is what the command line takes; it is derived from the name. Importing this module
loads nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

__all__ = ["FAMILIES", "IDENTIFIERS", "METHODS", "PARTS", "identifier", "parse_methods"]

OURS, PAPER, STEPS = "ours", "the paper's", "fewer steps"
OUTPUTS, FEATURES = "reuses outputs of the network", "reuses features inside it"

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "trajectory": OURS,
        "paper": PAPER,
        "paper, no timesteps": PAPER,
        "paper, policy only": PAPER,
        "our schedule, order 0": OURS,
        "our schedule, order 1": OURS,
        "our schedule, order 2": OURS,
        "fewer steps": STEPS,
        "uniform": OUTPUTS,
        "extrapolation, order 1": OUTPUTS,
        "extrapolation, order 2": OUTPUTS,
        "TeaCache": FEATURES,
        "ertacache-paper (features)": PAPER,
        "Delta-DiT": FEATURES,
        "ProfilingDiT": FEATURES,
        "T-GATE": FEATURES,
        "PAB": FEATURES,
        "FasterCache": FEATURES,
        "FirstBlockCache": FEATURES,
        "MagCache": FEATURES,
        "TaylorSeer": FEATURES,
        "SeaCache": FEATURES,
        "DBCache": FEATURES,
        "DBCache + TaylorSeer": FEATURES,
        "DBCache + DMD": FEATURES,
        "DBCache + FoCa": FEATURES,
        "Spectrum": FEATURES,
        "Spectrum, on outputs": OUTPUTS,
        "MeanCache": OUTPUTS,
        "EasyCache": OUTPUTS,
    }
)
"""The family of every method, by what it reuses, in the order of the tables."""

PARTS = frozenset(name for name in FAMILIES if name.startswith(("our schedule, ", "paper, ")))
"""Parts of a method, for ablations: they are no baselines."""

METHODS = tuple(FAMILIES)
"""Every method by its name; results files have it, so it stays."""


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
