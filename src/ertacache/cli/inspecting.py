"""``ertacache inspect``: what is in a policy or a profile.

Prints what the files hold and what the solver says of it; loads no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ertacache.cli.console import say, say_fact, say_table, say_validation, strip
from ertacache.cli.loading import load_any
from ertacache.cli.solving import say_policy

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from ertacache.core.plan import PaperPlan, TrajectoryPlan
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
        bool, typer.Option("--coefficients", help="Print what every step does, too.")
    ] = False,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Solve for every number of computed steps, too."),
    ] = False,
) -> None:
    """Show what is in a policy or a profile."""
    from ertacache.formats.policy import Policy

    found = load_any(file)
    profile = found.profile if isinstance(found, Policy) else found
    if frontier and profile is None:
        raise ValueError(f"{str(file)!r} has no profile in it, and so no frontier")
    if coefficients and not isinstance(found, Policy):
        raise ValueError(f"{str(file)!r} is a profile; only a policy has coefficients")
    if isinstance(found, Policy):
        _say_policy_file(file, found)
        if coefficients:
            _say_plan(found.plan)
    else:
        say_fact("profile", file)
        _say_profile(found)
    _say_fingerprint(found.fingerprint)
    if frontier and profile is not None:
        _say_frontier(profile)


def _say_policy_file(path: Path, policy: Policy) -> None:
    say_fact("policy", path)
    say_policy(policy)
    if policy.profile is not None:
        say_fact("profile", f"embedded, {policy.profile.num_prompts} prompts")
    for name, value in policy.provenance.items():
        say_fact(name, value)
    if policy.validation:
        say_validation(policy.validation)
    else:
        say_fact("validation", "none: not measured on held-out prompts")


def _say_profile(profile: Profile) -> None:
    say_fact("steps", profile.num_steps)
    say_fact("prompts", profile.num_prompts)
    seeds = [run.seed for run in profile.prompts]
    say_fact("seeds", f"{min(seeds)} to {max(seeds)}")
    for run in profile.prompts[:3]:
        say_fact("", f"{run.prompt} (seed {run.seed})")
    if profile.num_prompts > 3:
        say_fact("", f"and {profile.num_prompts - 3} more")
    for name, value in profile.provenance.items():
        say_fact(name, value)


def _say_fingerprint(run: Fingerprint) -> None:
    config = ", ".join(f"{key}={value}" for key, value in run.scheduler_config.items())
    say_fact("pipeline", run.pipeline)
    say_fact("network", f"{run.denoiser} ({run.denoiser_hash[:HASH_DIGITS]}), {run.dtype}")
    say_fact("scheduler", run.scheduler)
    say_fact("", config or "default configuration")
    say_fact("sigmas", f"{run.num_steps + 1} ({run.sigmas_hash[:HASH_DIGITS]})")
    say_fact("guidance", "none" if run.guidance is None else f"{run.guidance:g}")
    say_fact("latent", " x ".join(map(str, run.latent_shape)) or "a scalar")
    say_fact("versions", ", ".join(f"{name} {text}" for name, text in run.versions.items()))


def _say_plan(plan: TrajectoryPlan | PaperPlan) -> None:
    from ertacache.core.plan import TrajectoryPlan

    computed = set(plan.compute_steps)
    steps = [f"{k} {'computed' if k in computed else 'reused'}" for k in range(plan.num_steps)]
    if isinstance(plan, TrajectoryPlan):
        columns = ["step", "latent", *(f"output {j + 1}" for j in range(plan.history))]
        numbers = [
            [plan.latent[k].item(), *plan.outputs[k].tolist()] for k in range(plan.num_steps)
        ]
        title = "x[k+1] = latent x[k] + the last computed outputs, the newest first"
    else:
        columns, numbers = _paper_columns(plan)
        title = f"{plan.reuse} reuse; gain and bias are means"
    rows = [[step, *(f"{n:.6f}" for n in row)] for step, row in zip(steps, numbers, strict=True)]
    say_table(title, columns, rows)


def _paper_columns(plan: PaperPlan) -> tuple[list[str], list[list[float]]]:
    columns, tensors = ["step", "sigma"], [plan.sigmas[:-1]]
    if plan.gain is not None and plan.bias is not None:
        columns += ["gain", "bias"]
        tensors += [_row_means(plan.gain), _row_means(plan.bias)]
    return columns, [list(row) for row in zip(*(t.tolist() for t in tensors), strict=True)]


def _row_means(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _say_frontier(profile: Profile) -> None:
    from ertacache.calibration.solving import solve_all

    points = solve_all(profile).points
    rows: list[list[str | Text]] = [
        [
            str(point.computed),
            f"{profile.num_steps / point.computed:.2f}x",
            f"{point.predicted_error:.3g}",
            strip(point.plan.compute_steps, profile.num_steps),
        ]
        for point in points
    ]
    say_table(
        "Frontier: the best schedule found for every number of computed steps",
        ["computed", "fewer", "predicted error", "schedule"],
        rows,
    )
    say("predicted error: distance of the final latent to the full run's, on prompts left out")
