"""The fixed policies whose bytes are kept beside this file.

``python -m tests.formats.golden.objects`` writes them again, for a new version of the format.
``policy-v1.safetensors`` is of a format that is no longer read, and is never written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ertacache.core.frontier import KnownSchedule, MeasuredFit
from ertacache.core.gram import RunStatistics, Schedule
from ertacache.core.groups import FOLDS, Groups, GroupStatistics
from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.fingerprint import Fingerprint, hash_config
from ertacache.formats.fitted import FittedPlan, ValidationRow
from ertacache.formats.guided import GuidedCoefficients
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt

FOLDER = Path(__file__).parent
GROUPS = Groups(channels=3, bands=2)
SIGMAS = (1.0, 0.875, 0.625, 0.3, 0.0)
ROWS = (
    ValidationRow("policy", 3, 46.5, 1.3, 24),
    ValidationRow("plain reuse", 3, 32.6, 1.3, 24),
    ValidationRow("fewer steps", 4, math.inf, 1.0, 24),
)
SEEN = ValidationRow("policy", 2, 41.5, 1.4, 1, heldout=False)


def numbers(*shape: int, start: int = 1) -> Tensor:
    """Thirds of consecutive integers: not exact in binary, the same on every machine."""
    count = math.prod(shape)
    values = [k / 3 for k in range(start, start + count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def symmetric(*shape: int, start: int = 1) -> Tensor:
    upper = numbers(*shape, start=start).triu()
    return upper + upper.triu(1).mT


def sigma_schedule(num_steps: int = 4) -> Tensor:
    if num_steps == 4:
        return torch.tensor(SIGMAS, dtype=torch.float64)
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def schedule(num_steps: int = 4, *, begun: bool = True) -> Schedule:
    T = num_steps
    return Schedule(
        sigmas=sigma_schedule(T),
        nominal=numbers(T, 2, start=-3),
        latents=numbers(T + 1, T + 1, start=-7).tril(),
        scale=numbers(T + 1),
        begun=begun,
    )


def fingerprint(**changes: object) -> Fingerprint:
    facts: dict[str, object] = {
        "pipeline": "FluxPipeline",
        "denoiser": "FluxTransformer2DModel",
        "denoiser_hash": hash_config({"num_layers": 2, "axes_dims_rope": [4, 6, 6]}),
        "prediction": "flow",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "scheduler_config": {
            "shift": 3.0,
            "betas": (0.1, 0.2),
            "steps": 1000,
            "x": None,
            "y": True,
        },
        "guidance": {"guidance_scale": (2.5, 3.5)},
        "dtype": "float32",
        "latent_shape": (3, 2, 2),
        "versions": {"torch": "2.13.0", "diffusers": "0.42.1"},
    }
    return Fingerprint(**(facts | changes))  # type: ignore[arg-type]


def statistics(num_steps: int = 4, num_runs: int = 2, *, start: int = 1) -> RunStatistics:
    T, P, R = num_steps, num_runs, 2 * num_steps + 1
    return RunStatistics(
        inner=symmetric(P, R, R, start=start),
        means=numbers(P, R, start=-5),
        residual_l1=symmetric(P, T, T, start=start + 3),
        residual_norm=numbers(P, T, start=start),
        output_l1=symmetric(P, T, T, start=start + 9),
        output_norm=numbers(P, T, start=start + 2),
        elements=torch.arange(12, 12 + P),
    )


def group_statistics(
    folds: Sequence[int], num_steps: int = 4, groups: Groups = GROUPS
) -> GroupStatistics:
    """Statistics of runs with these folds; every run of a fold adds the same numbers."""
    counts = torch.bincount(torch.tensor(folds), minlength=FOLDS)
    one = symmetric(FOLDS, groups.count, num_steps + 1, num_steps + 1, start=4)
    return GroupStatistics(groups, counts.double().view(-1, 1, 1, 1) * one, counts)


def make_profile(
    num_steps: int = 4, num_runs: int = 2, *, first_seed: int = 0, groups: Groups | None = GROUPS
) -> Profile:
    """A profile whose runs alternate between two prompts and two sets of arguments.

    Run k is in fold k modulo 8.
    """
    kinds = (
        ("a red apple", (("guidance_scale", 2.5), ("height", 64))),
        ('ein grüner "Apfel" 🍏\n', (("guidance_scale", 3.5), ("style", None), ("tiled", True))),
    )
    runs = []
    for k in range(num_runs):
        prompt, arguments = kinds[k % 2]
        runs.append(ProfiledPrompt(prompt, first_seed + k, arguments))
    found = statistics(num_steps, num_runs, start=1 + first_seed)
    folds = tuple(k % FOLDS for k in range(num_runs))
    by_group = None if groups is None else group_statistics(folds, num_steps, groups)
    return Profile(schedule(num_steps), found, tuple(runs), (), folds, by_group)


def trajectory_plan(compute_steps: tuple[int, ...], coefficients: Tensor) -> TrajectoryPlan:
    """A plan with one group from coefficients of shape (T, 1 + H)."""
    return TrajectoryPlan(compute_steps, coefficients[:, None])


def grouped_plan(
    compute_steps: tuple[int, ...] = (0, 1, 3), groups: Groups = GROUPS, *, history: int = 2
) -> TrajectoryPlan:
    """A plan of four steps with groups and a second history."""
    z = numbers(4, groups.count, 1 + 2 * history, start=-6)
    z[:, :, 0] = z[:, :1, 0]
    return TrajectoryPlan(compute_steps, z, groups, branch=True)


def guided_coefficients(plan: TrajectoryPlan) -> GuidedCoefficients:
    """Coefficients for two values: those of a plan, and twice as large ones."""
    both = torch.stack([plan.coefficients, 2 * plan.coefficients])
    return GuidedCoefficients("guidance_scale", (2.5, 3.5), both)


def measured_plan() -> FittedPlan:
    """A plan with all that a file can say of one."""
    return FittedPlan(
        grouped_plan(),
        sigma_schedule(),
        target=schedule().target,
        predicted_error=0.001,
        measured_error=0.0025,
        validation=ROWS,
        target_psnr=42.5,
        guided=guided_coefficients(grouped_plan()),
    )


def short_plan() -> FittedPlan:
    """A plan for another sigma schedule, measured on a prompt that is not held out."""
    return FittedPlan(trajectory_plan((0, 2), numbers(3, 2)), sigma_schedule(3), validation=(SEEN,))


def paper_plan(*gain_shape: int, rectified: bool = True) -> FittedPlan:
    adjusted = torch.tensor((1.0, 0.875, 0.7, 0.35, 0.0), dtype=torch.float64)
    gain = numbers(4, *gain_shape, start=-4) if rectified else None
    bias = numbers(4, *gain_shape, start=2) if rectified else None
    plan = PaperPlan((0, 1, 3), "residual", adjusted, gain, bias)
    return FittedPlan(plan, sigma_schedule())


def golden_profile() -> Policy:
    """A profile of image-to-image runs and its provenance, nothing else."""
    profile = replace(make_profile(), schedule=schedule(begun=False))
    provenance = {"command": "ertacache profile emoji-flux", "note": ""}
    return Policy(fingerprint(), profile=profile, provenance=provenance)


def golden_policy() -> Policy:
    """A policy with everything, of a pipeline with two networks."""
    return Policy(
        fingerprint(),
        profile=replace(make_profile(), expert_steps=(3,)),
        plans=(measured_plan(), short_plan()),
        fits=(
            MeasuredFit(2, Fit(3, 0.1, 1.0, 2, Groups(bands=2), response=True), 1.5, uniform=True),
            MeasuredFit(3, Fit(4, 1e-3, 0.5), 1.25),
        ),
        frontier=(
            KnownSchedule((0, 3), 0.02),
            KnownSchedule((0, 1, 3), 0.001),
            KnownSchedule((0, 1, 2, 3), 0.0),
        ),
        unit_psnr=20.25,
        response=(0.5, 0.75, -0.25, 0.0),
        provenance={"command": "ertacache calibrate emoji-flux", "ertacache": "0.1.0"},
    )


def golden_paper_policy(*gain_shape: int, rectified: bool = True) -> Policy:
    """One plan of the paper's method, without a profile, of a pipeline without guidance."""
    plan = paper_plan(*(gain_shape or (3, 1, 1)), rectified=rectified)
    return Policy(fingerprint(guidance={}), plans=(plan,))


def facts(value: object) -> object:
    """All fields of a value and of its parts; tensors as type, shape and numbers."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.tolist())
    if dataclasses.is_dataclass(value):
        return {f.name: facts(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: facts(entry) for key, entry in value.items()}
    return [facts(entry) for entry in value] if isinstance(value, tuple) else value


GOLDEN = {
    "profile-v2.safetensors": golden_profile,
    "policy-v2.safetensors": golden_policy,
    "paper-policy-v2.safetensors": golden_paper_policy,
    "paper-policy-plain-v2.safetensors": lambda: golden_paper_policy(rectified=False),
}


if __name__ == "__main__":
    for name, build in GOLDEN.items():
        build().save(FOLDER / name)
