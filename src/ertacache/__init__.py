"""ertacache: profile a diffusers pipeline once, then pick any speed-up; the picture stays.

Names are resolved on first use, so that ``import ertacache`` loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ertacache.policy import Policy, PolicyError
    from ertacache.profile import Profile, ProfileError

__all__ = ["Policy", "PolicyError", "Profile", "ProfileError", "__version__"]

__version__ = "0.1.0.dev0"

_HOMES = {
    "Policy": "ertacache.policy",
    "PolicyError": "ertacache.policy",
    "Profile": "ertacache.profile",
    "ProfileError": "ertacache.profile",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ertacache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
