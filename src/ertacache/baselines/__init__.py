"""The rivals: other ways to make a pipeline faster, all attached and turned in the same way.

Knows how each method caches, not how it is measured.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ertacache.baselines.cachedit import DBCache
from ertacache.baselines.deltadit import DeltaDiT
from ertacache.baselines.fastercache import FasterCache
from ertacache.baselines.features import PaperFeatures, attach_features
from ertacache.baselines.fewer_steps import FewerSteps
from ertacache.baselines.firstblock import FirstBlockCache
from ertacache.baselines.interface import (
    Baseline,
    Handle,
    Knob,
    NotApplicableError,
    Runs,
    Stats,
    search_knob,
)
from ertacache.baselines.magcache import MagCache
from ertacache.baselines.pab import PAB
from ertacache.baselines.profilingdit import ProfilingDiT
from ertacache.baselines.seacache import SeaCache
from ertacache.baselines.taylorseer import TaylorSeer
from ertacache.baselines.teacache import TeaCache
from ertacache.baselines.tgate import TGate
from ertacache.baselines.uniform import Uniform

__all__ = [
    "BASELINES",
    "Baseline",
    "Handle",
    "Knob",
    "NotApplicableError",
    "Runs",
    "Stats",
    "attach_features",
    "search_knob",
]

_ALL: tuple[Baseline, ...] = (
    FewerSteps(),
    Uniform(),
    TeaCache(),
    PaperFeatures(),
    DeltaDiT(),
    ProfilingDiT(),
    TGate(),
    PAB(),
    FasterCache(),
    FirstBlockCache(),
    MagCache(),
    TaylorSeer(),
    SeaCache(),
    DBCache(),
    DBCache(name="DBCache + TaylorSeer", order=1),
)

BASELINES: Mapping[str, Baseline] = MappingProxyType({rival.name: rival for rival in _ALL})
"""Every rival by its name, in the order of the tables."""
