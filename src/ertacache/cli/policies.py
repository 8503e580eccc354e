"""A policy as the commands save and print it: its plans, what was measured, the verdict.

Shared by the commands that make or show one. Runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ertacache.cli.console import draw_mask, print_fact, print_line, print_table
from ertacache.cli.group import command_line
from ertacache.cli.writing import finite
from ertacache.formats.text import decibels, one_line

if TYPE_CHECKING:
    from ertacache.cli.writing import Output
    from ertacache.core.plans import PaperPlan, TrajectoryPlan
    from ertacache.formats.fitted import FittedPlan, ValidationRow
    from ertacache.formats.parts import Parts
    from ertacache.formats.policy import Policy

__all__ = [
    "NOT_RECOMMENDED",
    "describe_plan",
    "describe_profile",
    "print_plan",
    "print_verdicts",
    "profile_values",
    "save_policy",
]

NOT_RECOMMENDED = 3
"""Exit code of a command none of whose plans is recommended, or one of which misses its target."""


def save_policy(
    policy: Policy,
    output: Output,
    *,
    context: typer.Context,
    model: str | None = None,
    parts: Parts | None = None,
) -> None:
    """Write a policy, with the model and the command lines that made it, one per line.

    Then, and not before, the finished work that it was made of is removed.
    """
    provenance = dict(policy.provenance)
    if model is not None:
        provenance["model"] = model
    commands = [*provenance.get("command", "").split("\n"), command_line(context)]
    provenance["command"] = "\n".join(dict.fromkeys(filter(None, commands)))
    output.save(replace(policy, provenance=provenance))
    if parts is not None and output.writes:
        parts.remove()


def describe_profile(policy: Policy) -> str:
    """What the profile of a policy holds, in words."""
    profile = policy.profile
    if profile is None:
        return "no profile"
    runs = f"{profile.num_runs} run{'' if profile.num_runs == 1 else 's'}"
    return f"a profile of {runs} of {profile.num_steps} steps"


def profile_values(policy: Policy) -> dict[str, int] | None:
    """What the profile of a policy holds, for machines."""
    profile = policy.profile
    if profile is None:
        return None
    return {"runs": profile.num_runs, "num_steps": profile.num_steps}


def describe_plan(plan: FittedPlan) -> dict[str, object]:
    """What ``print_plan`` prints, for machines; the PSNR of identical results is null."""
    from ertacache.calibration.validate import recommend

    rows = [asdict(row) for row in plan.validation]
    for row in rows:
        row["psnr"] = finite(row["psnr"])
    return {
        "method": plan.method,
        "num_steps": plan.num_steps,
        "compute_steps": list(plan.compute_steps),
        "speedup": plan.speedup,
        "predicted_error": plan.predicted_error,
        "measured_error": plan.measured_error,
        "guided": None if plan.guided is None else plan.guided.to_json(),
        "validation": rows,
        "recommended": recommend(plan.validation).recommended if rows else None,
    }


def print_plan(plan: FittedPlan) -> None:
    """Print what a plan does and what was measured of it, and an empty line."""
    computed, reused = len(plan.compute_steps), len(plan.reuse_steps)
    print_fact("method", plan.method)
    print_fact(
        "steps",
        f"{plan.num_steps}: {computed} computed, {reused} reused "
        f"({plan.speedup:.2f} times fewer computed steps)",
    )
    print_fact("step mask", draw_mask(plan.compute_steps, plan.num_steps))
    _print_combination(plan.plan)
    if plan.guided is not None:
        print_fact("fitted for", f"{plan.guided}, interpolated between")
    if plan.measured_error is not None:
        print_fact("error", f"final latent {plan.measured_error:.3g} from the full run's")
    elif plan.predicted_error is not None:
        print_fact("predicted", f"final latent {plan.predicted_error:.3g} from the full run's")
    if plan.validation:
        _print_validation(plan.validation)
    else:
        print_fact("validation", "none: not measured on held-out prompts")
        print_line("")


def _print_combination(plan: TrajectoryPlan | PaperPlan) -> None:
    """Print what a step combines, and the parts of the latent that have their own coefficients."""
    from ertacache.core.plans import TrajectoryPlan

    if not isinstance(plan, TrajectoryPlan):
        return
    print_fact("groups", plan.groups)
    outputs = f"the last {plan.history} computed outputs"
    if plan.history == 1:
        outputs = "the last computed output"
    second = ", and of one guidance branch as many before guidance" if plan.branch else ""
    print_fact("history", outputs + second)


def _print_validation(rows: Sequence[ValidationRow]) -> None:
    cells = [
        [one_line(r.method), str(r.computed_steps), f"{r.speedup:.2f}x", decibels(r.psnr)]
        for r in rows
    ]
    title = f"Measured on {rows[0].measured_on}, to the full run"
    print_table(title, ["", "computed steps", "speed-up", "PSNR"], cells)


def print_verdicts(
    plans: Sequence[FittedPlan], path: Path, *, evaluations: str | None = None
) -> int:
    """Print the new plans of a policy with a verdict on each; returns the exit code.

    That is 0 if one of them is recommended, or none was measured, and none misses its target.

    Args:
        plans: the new plans.
        path: the file of the policy.
        evaluations: network evaluations that they took; None if they were not counted.
    """
    from ertacache.calibration.validate import missed_target, recommend

    measured = [plan for plan in plans if plan.validation]
    refused = [plan for plan in measured if not recommend(plan.validation).recommended]
    missed = [plan for plan in measured if missed_target(plan) is not None]
    for plan in plans:
        print_plan(plan)
        if plan.validation:
            print_line(str(recommend(plan.validation)))
            print_line(missed_target(plan) or "")
    if evaluations is not None:
        print_fact("NFE", f"{evaluations}, one prompt on one step each")
    objections = [*_at("not recommended", refused), *_at("target missed", missed)]
    print_line(", ".join([f"{path}: the policy", *objections]))
    return NOT_RECOMMENDED if missed or (measured and refused == measured) else 0


def _at(words: str, plans: Sequence[FittedPlan]) -> list[str]:
    """Words and the speed-ups of some plans; nothing if there are none."""
    return [f"{words} at {' and '.join(f'{p.speedup:.2f}x' for p in plans)}"] if plans else []
