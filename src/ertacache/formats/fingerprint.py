"""What a calibrated run was, and how another run differs from it.

The facts are read off a pipeline by ``integration.identity``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ertacache.formats.schema import (
    MAX_DIMENSIONS,
    MAX_INTEGER,
    MAX_STEPS,
    FormatError,
    canonical,
    check_count,
    check_number,
    check_string,
    check_strings,
    take_list,
    take_record,
)

__all__ = [
    "ConfigValue",
    "Difference",
    "Fingerprint",
    "hash_config",
    "hash_sigmas",
    "plain_config",
]

ConfigScalar: TypeAlias = bool | int | float | str | None
ConfigValue: TypeAlias = ConfigScalar | tuple[ConfigScalar, ...]

_FLOAT32 = struct.Struct("<f")
_SCALARS = (type(None), bool, int, float, str)
_WARNINGS = ("guidance", "dtype", "latent_shape", "versions")
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "denoiser": (str,),
    "denoiser_hash": (str,),
    "dtype": (str,),
    "guidance": (float, int, type(None)),
    "latent_shape": (list,),
    "num_steps": (int,),
    "pipeline": (str,),
    "scheduler": (str,),
    "scheduler_config": (dict,),
    "sigmas_hash": (str,),
    "versions": (dict,),
}


@dataclass(frozen=True)
class Difference:
    """One fact in which two runs differ.

    Attributes:
        field: name of the fact, with the key for mappings, as in ``"versions.torch"``.
        calibrated: its value in the calibrated run; None where it is absent.
        current: its value in the other run; None where it is absent.
        fatal: whether the policy cannot work; otherwise it may, and deserves a warning.
    """

    field: str
    calibrated: object
    current: object
    fatal: bool

    def __str__(self) -> str:
        """Return the difference in words: ``guidance is 5.0, was 3.5``."""
        return f"{self.field} is {_brief(self.current)}, was {_brief(self.calibrated)}"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What the calibrated run was.

    Attributes:
        pipeline: class name of the pipeline.
        denoiser: class name of the network.
        denoiser_hash: ``hash_config`` of its configuration, 64 hexadecimal digits.
        scheduler: class name of the scheduler.
        scheduler_config: its configuration, ``plain_config`` of it.
        num_steps: number of sampling steps T.
        sigmas_hash: ``hash_sigmas`` of the nominal sigma schedule.
        guidance: guidance scale; None for a run without guidance.
        dtype: number type of the network, such as ``"bfloat16"``.
        latent_shape: shape of one sample's latent, without the batch.
        versions: library name to version.
    """

    pipeline: str
    denoiser: str
    denoiser_hash: str
    scheduler: str
    scheduler_config: Mapping[str, ConfigValue]
    num_steps: int
    sigmas_hash: str
    guidance: float | None
    dtype: str
    latent_shape: tuple[int, ...]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        """Check every field, and keep copies that the caller cannot change."""
        for name in ("pipeline", "denoiser", "scheduler", "dtype"):
            check_string(name, getattr(self, name))
        for name in ("denoiser_hash", "sigmas_hash"):
            _check_hash(name, getattr(self, name))
        check_count("num_steps", self.num_steps, low=1, high=MAX_STEPS)
        if self.guidance is not None:
            object.__setattr__(self, "guidance", check_number("guidance", self.guidance))
        object.__setattr__(self, "latent_shape", _check_shape(self.latent_shape))
        object.__setattr__(self, "scheduler_config", _check_config(self.scheduler_config))
        object.__setattr__(self, "versions", check_strings("versions", self.versions))

    def compare(self, other: Fingerprint) -> list[Difference]:
        """Return the differences of ``other`` from this run, the fatal ones first.

        Example:
            >>> from dataclasses import replace
            >>> ours = Fingerprint(
            ...     pipeline="FluxPipeline", denoiser="FluxTransformer2DModel",
            ...     denoiser_hash=hash_config({}), scheduler="FlowMatchEulerDiscreteScheduler",
            ...     scheduler_config={"shift": 3.0}, num_steps=30, sigmas_hash=hash_config({}),
            ...     guidance=3.5, dtype="float32", latent_shape=(16, 8, 8), versions={},
            ... )
            >>> for d in ours.compare(replace(ours, guidance=5.0, scheduler_config={"shift": 1.0})):
            ...     print(d, d.fatal)
            scheduler_config.shift is 1.0, was 3.0 True
            guidance is 5.0, was 3.5 False
        """
        found = []
        for name in self.__dataclass_fields__:
            fatal = name not in _WARNINGS
            found += _differences(name, getattr(self, name), getattr(other, name), fatal=fatal)
        return sorted(found, key=lambda d: not d.fatal)

    def _to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def _from_json(cls, value: object) -> Fingerprint:
        record = dict(take_record(value, _JSON_TYPES, "fingerprint"))
        record["latent_shape"] = tuple(take_list(record["latent_shape"], int, "latent_shape"))
        record["scheduler_config"] = {
            key: tuple(entry) if isinstance(entry, list) else entry
            for key, entry in record["scheduler_config"].items()
        }
        return cls(**record)


def hash_sigmas(sigmas: Tensor) -> str:
    """Return the SHA-256 of a sigma schedule, as little-endian float32, in hexadecimal digits.

    Single precision is what schedulers keep, so a schedule and its float64 copy have one hash.

    Example:
        >>> hash_sigmas(torch.tensor([1.0, 0.5, 0.0]))[:16]
        'be115d3ffbb02587'
    """
    numbers = sigmas.detach().to("cpu", torch.float32).flatten().tolist()
    return sha256(b"".join(map(_FLOAT32.pack, numbers))).hexdigest()


def hash_config(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of ``plain_config(config)``.

    Example:
        >>> hash_config({"layers": 2, "_name_or_path": "here"}) == hash_config({"layers": 2})
        True
    """
    return sha256(canonical(plain_config(config)).encode()).hexdigest()


def plain_config(config: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """Return a configuration as a flat mapping of JSON scalars and tuples of them.

    Keys that begin with an underscore are left out: they say where and by which version it was
    stored. Infinities become strings and nested values their JSON, so that every scheduler's
    configuration can be kept.

    Example:
        >>> plain_config({"shift": 3, "lambda_min_clipped": -math.inf, "_class_name": "Any"})
        {'lambda_min_clipped': '-inf', 'shift': 3}
    """
    plain: dict[str, ConfigValue] = {}
    for key in sorted(key for key in config if not key.startswith("_")):
        value = _plain(key, config[key])
        if isinstance(value, list) and all(isinstance(entry, _SCALARS) for entry in value):
            plain[key] = tuple(value)
        else:
            plain[key] = canonical(value) if isinstance(value, list | dict) else value
    return plain


def _plain(key: str, value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(key, entry) for name, entry in value.items()}
    raise FormatError(f"the configuration's {key!r} is a {type(value).__name__}, which is not data")


def _differences(name: str, ours: Any, theirs: Any, *, fatal: bool) -> list[Difference]:
    if ours == theirs:
        return []
    if not isinstance(ours, Mapping):
        return [Difference(name, ours, theirs, fatal)]
    shared = {key for key in ours if key in theirs and ours[key] == theirs[key]}
    changed = sorted({*ours, *theirs} - shared)
    return [Difference(f"{name}.{k}", ours.get(k), theirs.get(k), fatal) for k in changed]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def _check_hash(name: str, value: object) -> None:
    text = check_string(name, value)
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise FormatError(f"{name} must be 64 hexadecimal digits, got {_brief(text)}")


def _check_shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMENSIONS:
        raise FormatError(f"latent_shape must be at most {MAX_DIMENSIONS} integers")
    return tuple(check_count("latent_shape", size, low=1) for size in value)


def _check_config(value: object) -> dict[str, ConfigValue]:
    if not isinstance(value, Mapping):
        raise FormatError(f"scheduler_config must be a mapping, got {type(value).__name__}")
    checked: dict[str, ConfigValue] = {}
    for key in sorted(check_string("a key of scheduler_config", key) for key in value):
        name, entry = f"scheduler_config.{key[:40]}", value[key]
        if isinstance(entry, list | tuple):
            checked[key] = tuple(_check_scalar(name, scalar) for scalar in entry)
        else:
            checked[key] = _check_scalar(name, entry)
    return checked


def _check_scalar(name: str, value: object) -> ConfigScalar:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_string(name, value, empty=True)
    if isinstance(value, int):
        return check_count(name, value, low=-MAX_INTEGER)
    if isinstance(value, float):
        return check_number(name, value)
    raise FormatError(f"{name} must be a JSON scalar, got {type(value).__name__}: use plain_config")
