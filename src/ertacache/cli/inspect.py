"""``ertacache inspect``: what is in a policy.

Prints what the file holds, with the frontier: what was measured and what is predicted for every
number of computed steps. Loads no model.
"""

from __future__ import annotations

import json as formatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ertacache.cli.console import Stages, draw_mask, print_fact, print_line, print_table
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import describe_plan, describe_profile, print_plan, profile_values
from ertacache.cli.writing import check_json, finite, write_json
from ertacache.formats.text import decibels

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from ertacache.core.frontier import MeasuredFit
    from ertacache.core.groups import Groups
    from ertacache.core.plans import PaperPlan, TrajectoryPlan
    from ertacache.formats.fingerprint import Fingerprint
    from ertacache.formats.policy import Policy
    from ertacache.formats.profile import Profile
    from ertacache.integration.solve import FrontierRow

__all__ = ["EXAMPLES", "inspect"]

EXAMPLES = (
    "ertacache inspect policy.safetensors",
    "ertacache inspect policy.safetensors --coefficients",
    "ertacache inspect profile.safetensors",
    "ertacache inspect hub:user/repo",
)
HASH_DIGITS = 12


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file, or hub:user/repo.")],
    coefficients: Annotated[
        bool, typer.Option("--coefficients", help="Also print the coefficients of every step.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Show what is in a policy.

    That is its profile, its plans, and the frontier of all speed-ups.
    """
    from ertacache.hub import open_policy

    check_json(json)
    policy = open_policy(file)
    if coefficients and not policy.plans:
        raise ValueError(f"{str(file)!r} holds no plan, and only a plan has coefficients")
    print_fact("policy", file)
    print_fact("profile", describe_profile(policy))
    if policy.profile is not None:
        _print_profile(policy.profile)
    _print_provenance(policy.provenance)
    _print_fingerprint(policy.fingerprint)
    print_line("")
    for plan in policy.plans:
        print_plan(plan)
        if coefficients:
            _print_coefficients(plan.plan)
    _print_fits(policy.fits)
    frontier = _solve_frontier(policy)
    if policy.profile is not None:
        _print_frontier(policy, frontier, policy.profile.num_steps)
    if json is not None:  # the verdicts take a second to import
        write_json(json, _values(policy, frontier))


def _solve_frontier(policy: Policy) -> list[FrontierRow]:
    from ertacache.integration.solve import PlanSolver

    if policy.profile is None:
        return []
    solver = PlanSolver(policy)
    if policy.frontier:
        return solver.rows()
    with Stages() as stage:  # of a profile alone it takes seconds
        stage("solve")
        return solver.rows()


def _print_provenance(provenance: Mapping[str, str]) -> None:
    for name, value in provenance.items():
        for place, line in enumerate(value.split("\n")):
            print_fact("" if place else name, line)


def _values(policy: Policy, frontier: Sequence[FrontierRow]) -> dict[str, object]:
    """What is in a policy, for machines."""
    return {
        "provenance": dict(policy.provenance),
        "fingerprint": formatter.loads(formatter.dumps(vars(policy.fingerprint), default=dict)),
        "profile": profile_values(policy),
        "plans": [describe_plan(plan) for plan in policy.plans],
        "frontier": [
            {
                "compute_steps": list(row.compute_steps),
                "error": row.error,
                "predicted_psnr": finite(row.predicted_psnr),
                "measured_psnr": finite(row.measured_psnr),
            }
            for row in frontier
        ],
    }


def _print_profile(profile: Profile) -> None:
    sigmas = profile.schedule.sigmas
    print_fact("sigmas", f"{sigmas[0]:.4g} to {sigmas[-1]:.4g} in {profile.num_steps} steps")
    unknown = "one group: the layout of the latent is not known"
    print_fact("groups", unknown if profile.finest is None else profile.finest)
    seeds = [run.seed for run in profile.runs]
    print_fact("seeds", f"{min(seeds)} to {max(seeds)}")
    for run in profile.runs[:3]:
        varied = "".join(f", {name}={value}" for name, value in run.arguments)
        print_fact("", f"{run.prompt} (seed {run.seed}{varied})")
    if profile.num_runs > 3:
        print_fact("", f"and {profile.num_runs - 3} more")


def _print_fingerprint(run: Fingerprint) -> None:
    config = ", ".join(f"{key}={value}" for key, value in run.scheduler_config.items())
    print_fact("pipeline", run.pipeline)
    print_fact("network", f"{run.denoiser} ({run.denoiser_hash[:HASH_DIGITS]}), {run.dtype}")
    print_fact("scheduler", run.scheduler)
    print_fact("", config or "default configuration")
    print_fact("prediction", run.prediction)
    guidance = (f"{k} {', '.join(f'{v:g}' for v in values)}" for k, values in run.guidance.items())
    print_fact("guidance", "; ".join(guidance) or "none")
    print_fact("latent", " x ".join(map(str, run.latent_shape)) or "a scalar")
    print_fact("versions", ", ".join(f"{name} {text}" for name, text in run.versions.items()))


def _print_coefficients(plan: TrajectoryPlan | PaperPlan) -> None:
    from ertacache.core.plans import TrajectoryPlan

    computed = set(plan.compute_steps)
    steps = [f"{k} {'computed' if k in computed else 'reused'}" for k in range(plan.num_steps)]
    numbers: list[list[float]]
    if isinstance(plan, TrajectoryPlan):
        columns = ["step", "latent", *_numbered("output", plan.history)]
        columns += _numbered("branch", plan.history) if plan.branch else []
        formula = "x[k+1] = latent x[k] + the last computed outputs, the newest first"
        tables = [
            (formula + _group_name(plan.groups, group), plan.coefficients[:, group].tolist())
            for group in range(plan.groups.count)
        ]
    else:
        columns, numbers = _paper_columns(plan)
        tables = [(f"{plan.reuse} reuse; gain and bias are means", numbers)]
    for title, numbers in tables:
        cells = ([f"{n:.6f}" for n in row] for row in numbers)
        rows = [[step, *row] for step, row in zip(steps, cells, strict=True)]
        print_table(title, columns, rows)


def _numbered(word: str, count: int) -> list[str]:
    return [f"{word} {j + 1}" for j in range(count)]


def _group_name(groups: Groups, group: int) -> str:
    """Which group it is; nothing if there is one."""
    band, channel = divmod(group, groups.channels)
    parts = [f"channel {channel + 1} of {groups.channels}"] * (groups.channels > 1)
    parts += [f"band {band + 1} of {groups.bands}"] * (groups.bands > 1)
    return "".join(f", {part}" for part in parts)


def _paper_columns(plan: PaperPlan) -> tuple[list[str], list[list[float]]]:
    columns, tensors = ["step", "sigma"], [plan.sigmas[:-1]]
    if plan.gain is not None and plan.bias is not None:
        columns += ["gain", "bias"]
        tensors += [_row_means(plan.gain), _row_means(plan.bias)]
    return columns, [list(row) for row in zip(*(t.tolist() for t in tensors), strict=True)]


def _row_means(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _print_fits(fits: Sequence[MeasuredFit]) -> None:
    if not fits:
        return
    rows = [
        [
            str(found.computed),
            str(found.fit.history),
            f"{found.fit.ridge:g}",
            str(found.fit.order),
            str(found.fit.groups),
            "uniform" if found.uniform else "searched",
            f"{found.error_ratio:.2f}",
        ]
        for found in fits
    ]
    print_table(
        "Fits: how plans are fitted best, measured on the network",
        ["computed", "history", "ridge", "order", "groups", "schedule", "error ratio"],
        rows,
    )
    print_line("order: of the polynomial that the ridge pulls towards; 0 is plain reuse")
    print_line("error ratio: measured over predicted")


def _print_frontier(policy: Policy, frontier: Sequence[FrontierRow], steps: int) -> None:
    rows: list[list[str | Text]] = [
        [
            str(len(row.compute_steps)),
            f"{steps / len(row.compute_steps):.2f}x",
            f"{row.error:.3g}",
            decibels(row.predicted_psnr),
            "" if row.measured_psnr is None else decibels(row.measured_psnr),
            draw_mask(row.compute_steps, steps),
        ]
        for row in frontier
    ]
    print_table(
        "Frontier: the best compute schedule found for every number of computed steps",
        ["computed", "fewer", "error", "predicted", "measured", "step mask"],
        rows,
    )
    print_line("error: distance of the final latent to the full run's; PSNR to the full run")
    if not policy.fits:
        print_line("predictions were not calibrated on the network: run ertacache calibrate")
