"""The fixed objects whose bytes are kept beside this file.

``python -m tests.formats.golden.objects`` writes them again, for a new version of the format.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.formats.fingerprint import Fingerprint, hash_config, hash_sigmas
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import Profile, ProfiledPrompt

FOLDER = Path(__file__).parent
SIGMAS = (1.0, 0.875, 0.625, 0.3, 0.0)


def numbers(*shape: int, start: int = 1) -> Tensor:
    """Thirds of consecutive integers: not exact in binary, the same on every machine."""
    count = math.prod(shape)
    values = [k / 3 for k in range(start, start + count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def symmetric(*shape: int, start: int = 1) -> Tensor:
    upper = numbers(*shape, start=start).triu()
    return upper + upper.triu(1).mT


def schedule(num_steps: int = 4) -> Tensor:
    """The sigma schedule of so many steps."""
    if num_steps == 4:
        return torch.tensor(SIGMAS, dtype=torch.float64)
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def fingerprint(num_steps: int = 4, **changes: object) -> Fingerprint:
    facts: dict[str, object] = {
        "pipeline": "FluxPipeline",
        "denoiser": "FluxTransformer2DModel",
        "denoiser_hash": hash_config({"num_layers": 2, "axes_dims_rope": [4, 6, 6]}),
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "scheduler_config": {
            "shift": 3.0,
            "betas": (0.1, 0.2),
            "steps": 1000,
            "x": None,
            "y": True,
        },
        "num_steps": num_steps,
        "sigmas_hash": hash_sigmas(schedule(num_steps)),
        "guidance": 3.5,
        "dtype": "float32",
        "latent_shape": (3, 2, 2),
        "versions": {"torch": "2.13.0", "diffusers": "0.42.1"},
    }
    return Fingerprint(**(facts | changes))  # type: ignore[arg-type]


def statistics(num_steps: int = 4, num_prompts: int = 2, *, start: int = 1) -> RunStatistics:
    T, P, R = num_steps, num_prompts, 2 * num_steps + 1
    return RunStatistics(
        inner=symmetric(P, R, R, start=start),
        means=numbers(P, R, start=-5),
        residual_l1=symmetric(P, T, T, start=start + 3),
        residual_norm=numbers(P, T, start=start),
        output_l1=symmetric(P, T, T, start=start + 9),
        output_norm=numbers(P, T, start=start + 2),
        elements=torch.arange(12, 12 + P),
    )


def golden_profile(num_steps: int = 4, num_prompts: int = 2, *, first_seed: int = 0) -> Profile:
    texts = ("a red apple", 'ein grüner "Apfel" 🍏\n')
    prompts = tuple(ProfiledPrompt(texts[k % 2], first_seed + k) for k in range(num_prompts))
    return Profile(
        fingerprint=fingerprint(num_steps),
        sigmas=schedule(num_steps),
        nominal=numbers(num_steps, 2, start=-3),
        statistics=statistics(num_steps, num_prompts, start=1 + first_seed),
        prompts=prompts,
    )


def golden_traced_profile() -> Profile:
    """A profile with provenance."""
    origin = {"command": "ertacache profile emoji-flux", "call": "num_inference_steps=4"}
    return replace(golden_profile(), provenance=origin)


def trajectory_plan(
    compute_steps: tuple[int, ...], latent: Tensor, outputs: Tensor
) -> TrajectoryPlan:
    """A plan from the two tensors of a file, shapes (T,) and (T, H)."""
    return TrajectoryPlan(compute_steps, torch.cat([latent[:, None], outputs], dim=1)[:, None])


def golden_policy(*, profile: bool = False) -> Policy:
    rows = (
        ValidationRow("policy", 3, 46.5, 1.3, 24),
        ValidationRow("plain reuse", 3, 32.6, 1.3, 24),
        ValidationRow("fewer steps", 4, math.inf, 1.0, 24),
    )
    return Policy(
        trajectory_plan((0, 1, 3), numbers(4), numbers(4, 3, start=-6)),
        schedule(),
        fingerprint=fingerprint(),
        predicted_error=0.001,
        validation=rows,
        provenance={"command": "ertacache calibrate emoji-flux", "ertacache": "0.1.0"},
        profile=golden_profile() if profile else None,
    )


def golden_paper_policy(*gain_shape: int, rectified: bool = True) -> Policy:
    shape = gain_shape or (3, 1, 1)
    adjusted = torch.tensor((1.0, 0.875, 0.7, 0.35, 0.0), dtype=torch.float64)
    gain = numbers(4, *shape, start=-4) if rectified else None
    bias = numbers(4, *shape, start=2) if rectified else None
    plan = PaperPlan((0, 1, 3), "residual", adjusted, gain, bias)
    return Policy(plan, schedule(), fingerprint=fingerprint(guidance=None))


def expert_policy() -> Policy:
    """A policy of a pipeline with two networks, calibrated for a PSNR; it has no golden file."""
    profile = replace(golden_profile(), expert_steps=(3,))
    return replace(
        golden_policy(), target_psnr=42.5, expert_steps=profile.expert_steps, profile=profile
    )


GOLDEN = {
    "policy-v1.safetensors": lambda: golden_policy(profile=True),
    "paper-policy-v1.safetensors": golden_paper_policy,
    "profile-v1.safetensors": golden_profile,
    "profile-v2.safetensors": golden_traced_profile,
}


if __name__ == "__main__":
    for name, build in GOLDEN.items():
        build().save(FOLDER / name)
