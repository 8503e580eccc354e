"""What a calibrated run was, and how another run differs from it.

The facts are read off a pipeline by ``integration.identity``.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from ertacache.formats.schema import (
    MAX_DIMENSIONS,
    MAX_INTEGER,
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
    "CFG",
    "UNKNOWN",
    "UNKNOWN_HASH",
    "ConfigValue",
    "Difference",
    "Fingerprint",
    "Level",
    "cfg_name",
    "check_scalar",
    "hash_config",
    "plain_config",
]

ConfigScalar: TypeAlias = bool | int | float | str | None
ConfigValue: TypeAlias = ConfigScalar | tuple[ConfigScalar, ...]

Level = Literal["fatal", "warning", "note"]

UNKNOWN = "unknown"
"""The network's class where it is not known, as in loops that only call a function."""

UNKNOWN_HASH = 64 * "0"
"""The hash of a configuration that is not known."""

CFG = "cfg"
"""ComfyUI's name of the scale of classifier-free guidance."""

_SCALARS = (type(None), bool, int, float, str)
MAX_VALUES = 1000  # of one guidance argument
# A plan follows the network and what its output means. Pipeline, scheduler and size may change: a
# plan is solved for the run at hand.
_LEVELS: dict[str, Level] = {
    "denoiser": "fatal",
    "denoiser_hash": "fatal",
    "prediction": "fatal",
    "guidance": "warning",
    "dtype": "warning",
    "versions": "warning",
}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "denoiser": (str,),
    "denoiser_hash": (str,),
    "dtype": (str,),
    "guidance": (dict,),
    "latent_shape": (list,),
    "pipeline": (str,),
    "prediction": (str,),
    "scheduler": (str,),
    "scheduler_config": (dict,),
    "versions": (dict,),
}


def cfg_name(names: Container[str]) -> str | None:
    """The argument that scales classifier-free guidance, by ComfyUI's name or by diffusers'.

    Where a pipeline has ``true_cfg_scale``, its ``guidance_scale`` is an input of the network.

    Example:
        >>> cfg_name({"guidance_scale", "true_cfg_scale"}), cfg_name({"guidance_scale"})
        ('true_cfg_scale', 'guidance_scale')
    """
    return next((name for name in (CFG, "true_cfg_scale", "guidance_scale") if name in names), None)


@dataclass(frozen=True)
class Difference:
    """One fact in which two runs differ.

    Attributes:
        field: name of the fact, with the key for mappings, as in ``"versions.torch"``.
        calibrated: its value in the calibrated run; None where it is absent.
        current: its value in the other run; None where it is absent.
        level: fatal if the policy cannot work, a warning if it may work less well, a note if it
            works all the same.
    """

    field: str
    calibrated: object
    current: object
    level: Level

    def __str__(self) -> str:
        """Return the difference in words: ``guidance is 5.0, was 3.5``."""
        return f"{self.field} is {_brief(self.current)}, was {_brief(self.calibrated)}"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What the calibrated run was.

    Attributes:
        pipeline: class name of the pipeline.
        denoiser: class name of the network; ``UNKNOWN`` if it is not known.
        denoiser_hash: ``hash_config`` of its configuration, 64 hexadecimal digits;
            ``UNKNOWN_HASH`` if it is not known.
        prediction: what the network outputs: ``"flow"``, ``"epsilon"``, ``"v_prediction"`` ...
        scheduler: class name of the scheduler.
        scheduler_config: its configuration, ``plain_config`` of it.
        guidance: guidance arguments, each with the values it had, ascending; empty without
            guidance.
        dtype: number type of the network, such as ``"bfloat16"``; ``UNKNOWN`` if it is not known.
        latent_shape: shape of one sample's latent, without the batch.
        versions: library name to version.
    """

    pipeline: str
    denoiser: str
    denoiser_hash: str
    prediction: str
    scheduler: str
    scheduler_config: Mapping[str, ConfigValue]
    guidance: Mapping[str, tuple[float, ...]]
    dtype: str
    latent_shape: tuple[int, ...]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        """Check every field, and keep copies that the caller cannot change."""
        for name in ("pipeline", "denoiser", "prediction", "scheduler", "dtype"):
            check_string(name, getattr(self, name))
        _check_hash("denoiser_hash", self.denoiser_hash)
        object.__setattr__(self, "guidance", _check_guidance(self.guidance))
        object.__setattr__(self, "latent_shape", _check_shape(self.latent_shape))
        object.__setattr__(self, "scheduler_config", _check_config(self.scheduler_config))
        object.__setattr__(self, "versions", check_strings("versions", self.versions))

    def compare(self, other: Fingerprint) -> list[Difference]:
        """Return the differences of ``other`` from this run, the fatal ones first.

        A guidance between the calibrated values is none, nor is a setting that only one of two
        scheduler classes has. What one of them does not know is not compared; where that is the
        network, the latents must have a number of channels in common.

        Example:
            >>> from dataclasses import replace
            >>> ours = Fingerprint(
            ...     pipeline="FluxPipeline", denoiser="FluxTransformer2DModel",
            ...     denoiser_hash=hash_config({}), prediction="flow",
            ...     scheduler="FlowMatchEulerDiscreteScheduler", scheduler_config={"shift": 3.0},
            ...     guidance={"guidance_scale": (2.0, 5.0)}, dtype="float32",
            ...     latent_shape=(16, 8, 8), versions={},
            ... )
            >>> guidance = {"guidance_scale": (7.0,)}
            >>> for d in ours.compare(replace(ours, guidance=guidance, prediction="epsilon")):
            ...     print(d.level + ":", d)
            fatal: prediction is 'epsilon', was 'flow'
            warning: guidance_scale is 7.0, was 2.0 to 5.0
            >>> ours.compare(replace(ours, guidance={"guidance_scale": (3.0,)}))
            []
        """
        found = []
        for name in self.__dataclass_fields__:
            level = _LEVELS.get(name, "note")
            ours, theirs = getattr(self, name), getattr(other, name)
            if name == "guidance":
                found += _guidance_differences(ours, theirs)
                continue
            if _unknown(name, ours) or _unknown(name, theirs):
                continue
            if name == "latent_shape" and UNKNOWN_HASH in (self.denoiser_hash, other.denoiser_hash):
                level = "note" if _share_channels(ours, theirs) else "fatal"
            if name == "scheduler_config" and self.scheduler != other.scheduler:
                ours = {key: value for key, value in ours.items() if key in theirs}
                theirs = {key: value for key, value in theirs.items() if key in ours}
            found += _differences(name, ours, theirs, level=level)
        return sorted(found, key=lambda d: _ORDER.index(d.level))

    def join_guidance(self, other: Fingerprint) -> Fingerprint:
        """This run with the guidance values of both."""
        names = {*self.guidance, *other.guidance}
        joined = {
            name: tuple(sorted({*self.guidance.get(name, ()), *other.guidance.get(name, ())}))
            for name in names
        }
        return replace(self, guidance=joined)

    def guidance_changes(self, other: Fingerprint) -> set[str]:
        """Guidance arguments whose values are not the same in both."""
        names = {*self.guidance, *other.guidance}
        return {name for name in names if self.guidance.get(name) != other.guidance.get(name)}

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
        record["guidance"] = {
            key: tuple(entry) if isinstance(entry, list) else entry
            for key, entry in record["guidance"].items()
        }
        return cls(**record)


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


_ORDER: tuple[Level, ...] = ("fatal", "warning", "note")


def _differences(name: str, ours: Any, theirs: Any, *, level: Level) -> list[Difference]:
    if ours == theirs:
        return []
    if not isinstance(ours, Mapping):
        return [Difference(name, ours, theirs, level)]
    shared = {key for key in ours if key in theirs and ours[key] == theirs[key]}
    changed = sorted({*ours, *theirs} - shared)
    return [Difference(f"{name}.{k}", ours.get(k), theirs.get(k), level) for k in changed]


def _guidance_differences(
    ours: Mapping[str, tuple[float, ...]], theirs: Mapping[str, tuple[float, ...]]
) -> list[Difference]:
    """Arguments whose values lie outside of the calibrated range, or that only one run has."""
    found = []
    for name in sorted({*ours, *theirs}):
        was, now = ours.get(name), theirs.get(name)
        if was is None or now is None or now[0] < was[0] or now[-1] > was[-1]:
            found.append(Difference(name, _range(was), _range(now), "warning"))
    return found


def _range(values: tuple[float, ...] | None) -> object:
    if values is None:
        return None
    return values[0] if values[0] == values[-1] else _Words(f"{values[0]} to {values[-1]}")


def _unknown(name: str, value: object) -> bool:
    known = {"denoiser": UNKNOWN, "denoiser_hash": UNKNOWN_HASH, "dtype": UNKNOWN}
    return name in known and value == known[name]


def _share_channels(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether latents of two shapes can be of one model; also if the channels are not known."""
    known = [_channels(shape) for shape in (ours, theirs)]
    return not all(known) or bool(known[0] & known[1])


def _channels(shape: tuple[int, ...]) -> set[int]:
    """Numbers of channels that a latent may have: tokens may pack squares of 2 x 2 pixels.

    Example:
        >>> _channels((16, 64, 64)), sorted(_channels((1024, 64))), _channels((8,))
        ({16}, [16, 64], set())
    """
    if len(shape) == 2:
        return {shape[1], shape[1] // 4} if shape[1] % 4 == 0 else {shape[1]}
    if len(shape) == 3:
        return {shape[0]}
    return {shape[0], shape[1], shape[3]} if len(shape) == 4 else set()


class _Words(str):
    """A string that stands in a sentence without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def _check_hash(name: str, value: object) -> None:
    text = check_string(name, value)
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise FormatError(f"{name} must be 64 hexadecimal digits, got {_brief(text)}")


def _check_guidance(value: object) -> dict[str, tuple[float, ...]]:
    if not isinstance(value, Mapping):
        raise FormatError(f"guidance must be a mapping, got {type(value).__name__}")
    checked: dict[str, tuple[float, ...]] = {}
    for key in sorted(check_string("a key of guidance", key) for key in value):
        name, entry = f"guidance.{key[:40]}", value[key]
        if not isinstance(entry, list | tuple) or not 1 <= len(entry) <= MAX_VALUES:
            raise FormatError(f"{name} must be a list of 1 to {MAX_VALUES} numbers")
        values = tuple(check_number(name, number) for number in entry)
        if list(values) != sorted(set(values)):
            raise FormatError(f"{name} must ascend")
        checked[key] = values
    return checked


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
            checked[key] = tuple(check_scalar(name, scalar) for scalar in entry)
        else:
            checked[key] = check_scalar(name, entry)
    return checked


def check_scalar(name: str, value: object) -> ConfigScalar:
    """Return ``value`` if it is a JSON scalar that a file can hold."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_string(name, value, empty=True)
    if isinstance(value, int):
        return check_count(name, value, low=-MAX_INTEGER)
    if isinstance(value, float):
        return check_number(name, value)
    raise FormatError(f"{name} must be a JSON scalar, got {type(value).__name__}: use plain_config")
