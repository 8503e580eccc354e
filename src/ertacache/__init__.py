"""ertacache: profile a diffusers pipeline once, then choose any speed-up, nearly the same output.

Names are resolved on first use, so that ``import ertacache`` loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ertacache.calibration.calibrate import calibrate
    from ertacache.calibration.profile import profile
    from ertacache.calibration.recorder import Recorder
    from ertacache.calibration.refit import refit
    from ertacache.calibration.solve import solve
    from ertacache.formats.policy import Policy, PolicyError
    from ertacache.integration.attach import attach, detach, summary, using
    from ertacache.integration.sample import sample

__all__ = [
    "Policy",
    "PolicyError",
    "Recorder",
    "attach",
    "calibrate",
    "detach",
    "profile",
    "refit",
    "sample",
    "solve",
    "summary",
    "using",
]

__version__ = "0.1.0.dev0"

_HOMES = {
    "Policy": "ertacache.formats.policy",
    "PolicyError": "ertacache.formats.policy",
    "Recorder": "ertacache.calibration.recorder",
    "attach": "ertacache.integration.attach",
    "calibrate": "ertacache.calibration.calibrate",
    "detach": "ertacache.integration.attach",
    "profile": "ertacache.calibration.profile",
    "refit": "ertacache.calibration.refit",
    "sample": "ertacache.integration.sample",
    "solve": "ertacache.calibration.solve",
    "summary": "ertacache.integration.attach",
    "using": "ertacache.integration.attach",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ertacache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*__all__, "__version__"])
