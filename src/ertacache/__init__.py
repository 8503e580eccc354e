"""ertacache: profile a diffusers pipeline once, then pick any speed-up; the picture stays.

Names are resolved on first use, so that ``import ertacache`` loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ertacache.calibration import calibrate, profile, solve
    from ertacache.formats.policy import Policy, PolicyError
    from ertacache.formats.profile import Profile, ProfileError
    from ertacache.integration import attach
    from ertacache.models import load_pipeline

__all__ = [
    "Policy",
    "PolicyError",
    "Profile",
    "ProfileError",
    "__version__",
    "attach",
    "calibrate",
    "load_pipeline",
    "profile",
    "solve",
]

__version__ = "0.1.0.dev0"

_HOMES = {
    "Policy": "ertacache.formats.policy",
    "PolicyError": "ertacache.formats.policy",
    "Profile": "ertacache.formats.profile",
    "ProfileError": "ertacache.formats.profile",
    "attach": "ertacache.integration",
    "calibrate": "ertacache.calibration",
    "load_pipeline": "ertacache.models",
    "profile": "ertacache.calibration",
    "solve": "ertacache.calibration",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ertacache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
