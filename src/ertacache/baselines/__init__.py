"""Baselines: other methods to make a pipeline faster, all attached through one interface.

How they are compared is up to ``ertacache.bench``.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ertacache.baselines.base import (
    Baseline,
    BaselineHandle,
    BaselineStats,
    NotApplicableError,
    Parameter,
    RunPrompts,
    search_parameter,
)
from ertacache.baselines.dbcache import DBCache
from ertacache.baselines.deltadit import DeltaDiT
from ertacache.baselines.easycache import EasyCache
from ertacache.baselines.fastercache import FasterCache
from ertacache.baselines.fewer_steps import FewerSteps
from ertacache.baselines.firstblock import FirstBlockCache
from ertacache.baselines.magcache import MagCache
from ertacache.baselines.meancache import MeanCache
from ertacache.baselines.pab import PAB
from ertacache.baselines.paper_features import PaperFeatures
from ertacache.baselines.profilingdit import ProfilingDiT
from ertacache.baselines.seacache import SeaCache
from ertacache.baselines.spectrum import Spectrum
from ertacache.baselines.taylorseer import TaylorSeer
from ertacache.baselines.teacache import TeaCache
from ertacache.baselines.tgate import TGate
from ertacache.baselines.uniform import Uniform

__all__ = [
    "BASELINES",
    "Baseline",
    "BaselineHandle",
    "BaselineStats",
    "NotApplicableError",
    "Parameter",
    "RunPrompts",
    "search_parameter",
]

_ALL: tuple[Baseline, ...] = (
    FewerSteps(),
    Uniform(),
    Uniform(name="extrapolation, order 1", order=1),
    Uniform(name="extrapolation, order 2", order=2),
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
    DBCache(name="DBCache + TaylorSeer", calibrator="TaylorSeer"),
    DBCache(name="DBCache + DMD", calibrator="DMD"),
    DBCache(name="DBCache + FoCa", calibrator="FoCa"),
    Spectrum(),
    Spectrum(name="Spectrum, on outputs", on_outputs=True),
    MeanCache(),
    EasyCache(),
)

BASELINES: Mapping[str, Baseline] = MappingProxyType({one.name: one for one in _ALL})
"""Every baseline by its name, in the order of the tables."""
