"""``ertacache inspect``: what is in a policy or a profile.

Prints what the file holds and what the solver predicts from it. Loads no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ertacache.cli.console import draw_mask, print_fact, print_line, print_table
from ertacache.cli.loading import load_any
from ertacache.cli.policies import print_policy, print_validation

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from ertacache.core.plans import PaperPlan, TrajectoryPlan
    from ertacache.formats.fingerprint import Fingerprint
    from ertacache.formats.policy import Policy
    from ertacache.formats.profile import Profile

__all__ = ["EXAMPLES", "inspect"]

EXAMPLES = (
    "ertacache inspect policy.safetensors",
    "ertacache inspect policy.safetensors --coefficients",
    "ertacache inspect profile.safetensors --frontier",
)
HASH_DIGITS = 12


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy or a profile.")],
    coefficients: Annotated[
        bool, typer.Option("--coefficients", help="Also print the coefficients of every step.")
    ] = False,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Also solve for every number of computed steps."),
    ] = False,
) -> None:
    """Show what is in a policy or a profile."""
    from ertacache.formats.policy import Policy

    found = load_any(file)
    profile = found.profile if isinstance(found, Policy) else found
    if frontier and profile is None:
        raise ValueError(f"{str(file)!r} has no profile in it, which the frontier needs")
    if coefficients and not isinstance(found, Policy):
        raise ValueError(f"{str(file)!r} is a profile; only a policy has coefficients")
    if isinstance(found, Policy):
        _print_policy_file(file, found)
        if coefficients:
            _print_plan(found.plan)
    else:
        print_fact("profile", file)
        _print_profile(found)
    _print_fingerprint(found.fingerprint)
    if frontier and profile is not None:
        _print_frontier(profile)


def _print_policy_file(path: Path, policy: Policy) -> None:
    print_fact("policy", path)
    print_policy(policy)
    if policy.profile is not None:
        print_fact("profile", f"embedded, {policy.profile.num_prompts} prompts")
    for name, value in policy.provenance.items():
        print_fact(name, value)
    if policy.validation:
        print_validation(policy.validation)
    else:
        print_fact("validation", "none: not measured on held-out prompts")


def _print_profile(profile: Profile) -> None:
    print_fact("steps", profile.num_steps)
    print_fact("prompts", profile.num_prompts)
    seeds = [run.seed for run in profile.prompts]
    print_fact("seeds", f"{min(seeds)} to {max(seeds)}")
    for run in profile.prompts[:3]:
        print_fact("", f"{run.prompt} (seed {run.seed})")
    if profile.num_prompts > 3:
        print_fact("", f"and {profile.num_prompts - 3} more")
    for name, value in profile.provenance.items():
        print_fact(name, value)


def _print_fingerprint(run: Fingerprint) -> None:
    config = ", ".join(f"{key}={value}" for key, value in run.scheduler_config.items())
    print_fact("pipeline", run.pipeline)
    print_fact("network", f"{run.denoiser} ({run.denoiser_hash[:HASH_DIGITS]}), {run.dtype}")
    print_fact("scheduler", run.scheduler)
    print_fact("", config or "default configuration")
    print_fact("sigmas", f"{run.num_steps + 1} ({run.sigmas_hash[:HASH_DIGITS]})")
    print_fact("guidance", "none" if run.guidance is None else f"{run.guidance:g}")
    print_fact("latent", " x ".join(map(str, run.latent_shape)) or "a scalar")
    print_fact("versions", ", ".join(f"{name} {text}" for name, text in run.versions.items()))


def _print_plan(plan: TrajectoryPlan | PaperPlan) -> None:
    from ertacache.core.plans import TrajectoryPlan

    computed = set(plan.compute_steps)
    steps = [f"{k} {'computed' if k in computed else 'reused'}" for k in range(plan.num_steps)]
    if isinstance(plan, TrajectoryPlan):
        columns = ["step", "latent", *(f"output {j + 1}" for j in range(plan.history))]
        numbers: list[list[float]] = plan.coefficients[:, 0].tolist()
        title = "x[k+1] = latent x[k] + the last computed outputs, the newest first"
    else:
        columns, numbers = _paper_columns(plan)
        title = f"{plan.reuse} reuse; gain and bias are means"
    rows = [[step, *(f"{n:.6f}" for n in row)] for step, row in zip(steps, numbers, strict=True)]
    print_table(title, columns, rows)


def _paper_columns(plan: PaperPlan) -> tuple[list[str], list[list[float]]]:
    columns, tensors = ["step", "sigma"], [plan.sigmas[:-1]]
    if plan.gain is not None and plan.bias is not None:
        columns += ["gain", "bias"]
        tensors += [_row_means(plan.gain), _row_means(plan.bias)]
    return columns, [list(row) for row in zip(*(t.tolist() for t in tensors), strict=True)]


def _row_means(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _print_frontier(profile: Profile) -> None:
    from ertacache.calibration.solve import solve_profile

    points = solve_profile(profile).points
    rows: list[list[str | Text]] = [
        [
            str(point.computed),
            f"{profile.num_steps / point.computed:.2f}x",
            f"{point.predicted_error:.3g}",
            draw_mask(point.plan.compute_steps, profile.num_steps),
        ]
        for point in points
    ]
    print_table(
        "Frontier: the best compute schedule found for every number of computed steps",
        ["computed", "fewer", "predicted error", "step mask"],
        rows,
    )
    print_line(
        "predicted error: distance of the final latent to the full run's, on prompts left out"
    )
