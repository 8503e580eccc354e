"""What a pipeline is, and whether a policy was calibrated for it.

Facts that a pipeline has before it runs are compared on attach, the rest when a run starts.
"""

from __future__ import annotations

import logging
import math
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import replace

import diffusers
import torch
from torch import Tensor, nn

from ertacache.formats.fingerprint import (
    Difference,
    Fingerprint,
    hash_config,
    hash_sigmas,
    plain_config,
)
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.private_api import Pipeline, Scheduler, unwrap
from ertacache.integration.schedulers import read_sigmas, sigma_distance

__all__ = [
    "calibrate_command",
    "check_pipeline",
    "check_run",
    "current_guidance",
    "find_denoisers",
    "fingerprint",
    "model_name",
    "run_differences",
    "same_share",
    "warn_of_differences",
    "warn_of_versions",
]

DENOISERS = ("transformer", "transformer_2", "unconditional_transformer", "unet")
_REPORTED: set[tuple[object, ...]] = set()  # policies whose versions were reported in this process
_LOG = logging.getLogger(__name__)
SIGMA_TOLERANCE = 1e-4  # of the range: other hardware rounds, another shift is far above


def find_denoisers(pipe: Pipeline) -> dict[str, nn.Module]:
    """Return the networks of a pipeline by their names, at least one."""
    found = {name: getattr(pipe, name, None) for name in DENOISERS}
    modules = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not modules or getattr(pipe, "scheduler", None) is None:
        raise TypeError(
            f"{type(pipe).__name__} is not a pipeline that ertacache knows: it needs a scheduler "
            f"and one of {', '.join(DENOISERS)}"
        )
    return modules


def current_guidance(pipe: Pipeline) -> float | None:
    """Return the guidance scale of a pipeline's present or last run, None if it has none."""
    scale = getattr(pipe, "guidance_scale", None)
    return float(scale) if isinstance(scale, int | float) else None


def fingerprint(pipe: Pipeline, *, sigmas: Tensor, latent_shape: Sequence[int]) -> Fingerprint:
    """Return what a pipeline's run was; call it after the run, which sets the guidance scale.

    Args:
        pipe: the pipeline.
        sigmas: the nominal sigma schedule of the run, from ``read_sigmas`` or ``record``.
        latent_shape: shape of one sample's latent, without the batch.
    """
    denoisers = find_denoisers(pipe)
    networks = {name: unwrap(module) for name, module in denoisers.items()}
    configs = {name: plain_config(_config(module)) for name, module in networks.items()}
    first = next(iter(networks))
    return Fingerprint(
        pipeline=type(pipe).__name__,
        denoiser=type(networks[first]).__name__,
        denoiser_hash=hash_config(configs[first] if len(configs) == 1 else configs),
        scheduler=type(pipe.scheduler).__name__,
        scheduler_config=plain_config(pipe.scheduler.config),
        num_steps=len(sigmas) - 1,
        sigmas_hash=hash_sigmas(sigmas),
        guidance=current_guidance(pipe),
        dtype=str(next(networks[first].parameters()).dtype).removeprefix("torch."),
        latent_shape=tuple(latent_shape),
        versions={"diffusers": diffusers.__version__, "torch": torch.__version__},
    )


def check_pipeline(pipe: Pipeline, policy: Policy) -> None:
    """Compare what is known before a run: raise for what cannot work, warn of the rest."""
    was = policy.fingerprint
    now = fingerprint(pipe, sigmas=policy.sigmas, latent_shape=was.latent_shape)
    differences = was.compare(replace(now, guidance=was.guidance))
    fatal = [difference for difference in differences if difference.fatal]
    if fatal:
        raise PolicyError(
            "the policy was calibrated for another pipeline: "
            + _listed(fatal)
            + "; attach it to the pipeline it was calibrated for, or calibrate a new one"
        )
    versions = [d for d in differences if d.field.startswith("versions.")]
    warn_of_differences([d for d in differences if d not in versions])
    warn_of_versions(policy, versions)


def warn_of_versions(policy: Policy, differences: Sequence[Difference]) -> None:
    """Report once per policy and process that library versions differ.

    Another minor version of diffusers is a warning, since its pipelines and schedulers may behave
    differently; anything less is logged at level INFO.
    """
    facts, compute_steps = policy.fingerprint, policy.compute_steps
    same = (facts.denoiser_hash, facts.sigmas_hash, compute_steps, policy.predicted_error)
    key = (*same, *sorted(facts.versions.items()))
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


def check_run(scheduler: Scheduler, policy: Policy, *, model: str | None = None) -> int:
    """Compare the sigmas that ``set_timesteps`` just made with the policy's; raise if they differ.

    Args:
        scheduler: the scheduler.
        policy: the policy.
        model: what the pipeline was loaded from, for the command to run instead.

    Returns:
        The step of the policy with which the run begins: 0, or later if the run has only the last
        entries of the policy's sigma schedule.
    """
    steps = len(scheduler.timesteps)
    first = policy.num_steps - steps
    if first >= 0:
        distance = sigma_distance(policy.sigmas[first:], read_sigmas(scheduler))
        if distance <= SIGMA_TOLERANCE:
            return first
    command = calibrate_command(policy, model, steps=steps)
    if first:
        raise PolicyError(
            f"the run has {steps} steps, but the policy is for {policy.num_steps}: "
            f"pass num_inference_steps={policy.num_steps}, of which "
            f"{len(policy.compute_steps)} are computed, or run: {command}"
        )
    raise PolicyError(
        f"the run's sigma schedule differs from the policy's by {distance:.1%} of its range: a "
        "shift that depends on the resolution, or sigmas= or timesteps= were passed; "
        f"leave them as calibrated, or run: {command} {_AS_CALLED}"
    )


_AS_CALLED = "(with --height, --width and --arg sigmas=[...] as in this call)"


def model_name(pipe: Pipeline) -> str | None:
    """Return the folder or hub id that a pipeline was loaded from, None if it was not."""
    name = getattr(pipe, "name_or_path", None)
    return name if isinstance(name, str) and name else None


def calibrate_command(policy: Policy, model: str | None, *, steps: int) -> str:
    """Return the command that calibrates a policy of the same kind for runs of ``steps`` steps."""
    options = ["--method", policy.method] if policy.method != "trajectory" else []
    options += ["--steps", str(steps), "--compute-steps", str(same_share(policy, steps))]
    words = ["ertacache", "calibrate", model or "MODEL", "--prompts", "prompts.txt", *options]
    return shlex.join([*words, "-o", f"policy-{steps}.safetensors"])


def same_share(policy: Policy, num_steps: int) -> int:
    """Computed steps of another number of steps, for the same share as the policy's, rounded up."""
    return math.ceil(num_steps * len(policy.compute_steps) / policy.num_steps)


def run_differences(policy: Policy, pipe: Pipeline, *, sample: Tensor) -> list[Difference]:
    """Return in what a run that has begun may differ from the calibrated one."""
    was = policy.fingerprint
    facts = {"guidance": current_guidance(pipe), "latent_shape": tuple(sample.shape[1:])}
    return was.compare(replace(was, **facts))  # type: ignore[arg-type]


def warn_of_differences(differences: Sequence[Difference]) -> None:
    """Warn of all differences in one sentence, if there are any."""
    if differences:
        warnings.warn(
            "the policy was calibrated under other conditions: " + _listed(differences),
            stacklevel=2,
        )


def _listed(differences: Sequence[Difference]) -> str:
    return ", ".join(map(str, differences))


def _config(module: nn.Module) -> dict[str, object]:
    return dict(getattr(module, "config", {}))
