"""What a pipeline is, and whether a policy was calibrated for it.

Facts that a pipeline has before it runs are compared on attach, the rest when a run starts.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from numbers import Real
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from ertacache.formats.fingerprint import (
    CFG,
    UNKNOWN,
    UNKNOWN_HASH,
    ConfigValue,
    Difference,
    Fingerprint,
    cfg_name,
    hash_config,
    plain_config,
)
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.loops import Loop
from ertacache.integration.private_api import CallArgument, Pipeline, call_arguments, unwrap
from ertacache.integration.schedulers import prediction_of

__all__ = [
    "check_pipeline",
    "current_guidance",
    "find_denoisers",
    "fingerprint",
    "guidance_number",
    "refuse_differences",
    "run_differences",
    "warn_of_differences",
    "warn_of_versions",
]

DENOISERS = ("transformer", "transformer_2", "unconditional_transformer", "unet")
_REPORTED: set[tuple[object, ...]] = set()  # policies whose versions were reported in this process
_LOG = logging.getLogger(__name__)
# Parts of the names of arguments that guide; the last ones perturb attention or skip layers.
GUIDANCE = ("guidance", "cfg", "pag_", "sag_", "stg_", "modality_scale")


def find_denoisers(pipe: Pipeline) -> dict[str, nn.Module]:
    """Return the networks of a pipeline by their names, at least one.

    Raises:
        TypeError: if there is none, or no scheduler.
    """
    found = {name: getattr(pipe, name, None) for name in DENOISERS}
    modules = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if modules and getattr(pipe, "scheduler", None) is not None:
        return modules
    others = {name: other for name, other in found.items() if other is not None}
    if not modules and others:
        name, other = next(iter(others.items()))
        raise TypeError(
            f"{name} of {type(pipe).__name__} is a {type(other).__name__}, on which no hook can be "
            "put: wrap it in a torch.nn.Module whose forward calls it"
        )
    raise TypeError(
        f"{type(pipe).__name__} is not a pipeline that ertacache knows: it needs a scheduler "
        f"and one of {', '.join(DENOISERS)}"
    )


def guidance_number(name: str, value: object) -> float | None:
    """The value of an argument if it is one of guidance and a number; booleans are 0 and 1.

    Example:
        >>> guidance_number("true_cfg_scale", 2), guidance_number("use_dynamic_cfg", True)
        (2.0, 1.0)
        >>> guidance_number("height", 64), guidance_number("guidance_scale", None)
        (None, None)
    """
    if not isinstance(value, Real) or not any(part in name for part in GUIDANCE):
        return None
    return float(value) if math.isfinite(value) else None


def _call_guidance(pipe: Pipeline) -> dict[str, CallArgument]:
    """Guidance arguments of the call under way; of a scale that is no argument the property."""
    scale = CallArgument(getattr(pipe, "guidance_scale", None), None)
    given = {"guidance_scale": scale} | call_arguments(pipe)
    found = {k: v for name, argument in given.items() for k, v in _entries(name, argument)}
    return {
        name: argument
        for name, argument in found.items()
        if guidance_number(name, argument.value) is not None
    }


def _entries(name: str, argument: CallArgument) -> list[tuple[str, CallArgument]]:
    """An argument, or the two ends of one that is an interval.

    Longer sequences have one entry per step, and are compared by nobody.

    Example:
        >>> _entries("guidance_interval", CallArgument((0.2, 0.8), None))[1]
        ('guidance_interval[1]', CallArgument(value=0.8, default=None))
    """
    values, defaults = argument
    if not isinstance(values, list | tuple) or len(values) != 2:
        return [(name, argument)]
    alike = isinstance(defaults, list | tuple) and len(defaults) == len(values)
    return [
        (f"{name}[{k}]", CallArgument(value, defaults[k] if alike else None))
        for k, value in enumerate(values)
    ]


def current_guidance(pipe: Pipeline) -> dict[str, tuple[float, ...]]:
    """Return the guidance arguments of a pipeline's call, those with their default included.

    Outside of a call, and where it is not found, the pipeline's property ``guidance_scale``, which
    is that of the last call; nothing if it has none.
    """
    return {name: (float(argument.value),) for name, argument in _call_guidance(pipe).items()}


def fingerprint(
    pipe: Pipeline,
    *,
    latent_shape: Sequence[int],
    guidance: Mapping[str, tuple[float, ...]] | None = None,
) -> Fingerprint:
    """Return what a pipeline's run was.

    Args:
        pipe: the pipeline.
        latent_shape: shape of one sample's latent, without the batch.
        guidance: guidance of all runs; by default ``current_guidance``.
    """
    values = current_guidance(pipe) if guidance is None else guidance
    if isinstance(pipe, Loop):
        return pipe.fingerprint(latent_shape=latent_shape, guidance=values)
    denoisers = find_denoisers(pipe)
    networks = {name: unwrap(module) for name, module in denoisers.items()}
    first = next(iter(networks))
    return Fingerprint(
        pipeline=type(pipe).__name__,
        denoiser=type(networks[first]).__name__,
        denoiser_hash=_hash(networks),
        prediction=prediction_of(pipe.scheduler),
        scheduler=type(pipe.scheduler).__name__,
        scheduler_config=plain_config(pipe.scheduler.config),
        guidance=values,
        dtype=_dtype(networks[first]),
        latent_shape=tuple(latent_shape),
        versions={"diffusers": diffusers.__version__, "torch": torch.__version__},
    )


def check_pipeline(pipe: Pipeline, policy: Policy) -> None:
    """Compare what is known before a run: raise for what cannot work, warn of the rest."""
    was = policy.fingerprint
    now = fingerprint(pipe, latent_shape=was.latent_shape, guidance=was.guidance)
    differences = [d for d in was.compare(now) if d.level != "note"]
    refuse_differences(differences)
    versions = [d for d in differences if d.field.startswith("versions.")]
    warn_of_differences([d for d in differences if d not in versions])
    warn_of_versions(policy, versions)


def refuse_differences(differences: Sequence[Difference]) -> None:
    """Raise if there are differences with which a policy cannot work."""
    fatal = [difference for difference in differences if difference.level == "fatal"]
    if fatal:
        raise PolicyError(
            "the policy was calibrated for another pipeline: "
            + _listed(fatal)
            + "; attach it to the pipeline it was calibrated for, or calibrate a new one"
        )


def warn_of_versions(policy: Policy, differences: Sequence[Difference]) -> None:
    """Report once per policy and process that library versions differ.

    Another minor version of diffusers is a warning, since its pipelines and schedulers may behave
    differently; anything less is logged at level INFO.
    """
    facts = policy.fingerprint
    known = tuple((plan.compute_steps, plan.predicted_error) for plan in policy.plans)
    key = (facts.denoiser_hash, known, *sorted(facts.versions.items()))
    if not differences or key in _REPORTED:
        return
    _REPORTED.add(key)
    if any(
        d.field == "versions.diffusers" and _series(d.calibrated, d.current) for d in differences
    ):
        warn_of_differences(differences)
    else:
        _LOG.info("the policy was calibrated with other versions: %s", _listed(differences))


def _series(*versions: object) -> bool:
    """Return whether two versions are known and differ before the second dot."""
    known = [version.split(".")[:2] for version in versions if isinstance(version, str)]
    return len(known) == 2 and known[0] != known[1]


def run_differences(policy: Policy, pipe: Pipeline, *, sample: Tensor) -> list[Difference]:
    """Return in what a run that is under way differs from the calibrated ones.

    An argument that the policy does not know counts as calibrated with its default, and one that
    the pipeline does not take is not compared. Of a loop only what was named is known.
    """
    call, facts = _call_guidance(pipe), policy.fingerprint
    if facts.denoiser_hash == UNKNOWN_HASH:  # a loop, whose guidance is its own affair
        facts = replace(facts, guidance=_under_names_of(call, facts.guidance))
        call = {name: argument for name, argument in call.items() if name in facts.guidance}
    defaults = {
        name: (float(argument.default),)
        for name, argument in call.items()
        if guidance_number(name, argument.default) is not None
    }
    was = replace(facts, guidance=defaults | dict(facts.guidance))
    now = {name: (float(argument.value),) for name, argument in call.items()}
    guidance = dict(was.guidance) | now
    return was.compare(replace(was, guidance=guidance, latent_shape=tuple(sample.shape[1:])))


def _under_names_of(
    call: Mapping[str, CallArgument], guidance: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    """Guidance with ComfyUI's scale under the name that a call has for it."""
    names = {CFG: cfg_name(call) or CFG}
    return {names.get(name, name): values for name, values in guidance.items()}


def warn_of_differences(differences: Sequence[Difference]) -> None:
    """Warn of all differences in one sentence, if there are any; notes are logged."""
    notes = [d for d in differences if d.level == "note"]
    if notes:
        _LOG.info("the run differs from the calibrated ones: %s", _listed(notes))
    others = [d for d in differences if d.level != "note"]
    if others:
        warnings.warn(
            "the policy was calibrated under other conditions: " + _listed(others), stacklevel=2
        )


def _listed(differences: Sequence[Difference]) -> str:
    return ", ".join(map(str, differences))


def _hash(networks: Mapping[str, nn.Module]) -> str:
    """Hash of the configurations of all networks; unknown if nothing tells them from others."""
    configs = {name: _config(module) for name, module in networks.items()}
    if not all(configs.values()):
        return UNKNOWN_HASH
    return hash_config(next(iter(configs.values())) if len(configs) == 1 else configs)


def _config(module: nn.Module) -> dict[str, ConfigValue]:
    """The configuration of a network; of one that has none, the shapes of its parameters."""
    given: Any = getattr(module, "config", None)
    if given is not None:
        with suppress(TypeError, ValueError):
            return plain_config(dict(given))
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}


def _dtype(module: nn.Module) -> str:
    """Number type of a network; that of what it is wrapped around may not be known."""
    weight = next(chain(module.parameters(), module.buffers()), None)
    return UNKNOWN if weight is None else str(weight.dtype).removeprefix("torch.")
