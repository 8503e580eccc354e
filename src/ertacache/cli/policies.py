"""A policy as the commands save and print it: its plans, what was measured, the verdict.

Shared by the commands that make or show one. Runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ertacache.cli.console import decibels, draw_mask, print_fact, print_line, print_table
from ertacache.cli.group import command_line, one_line

if TYPE_CHECKING:
    from ertacache.formats.fitted import FittedPlan, ValidationRow
    from ertacache.formats.policy import Policy

__all__ = [
    "NOT_RECOMMENDED",
    "describe_profile",
    "print_plan",
    "print_validation",
    "print_verdicts",
    "save_policy",
]

NOT_RECOMMENDED = 3
"""Exit code of a command none of whose plans is recommended, or that misses its target."""


def save_policy(
    policy: Policy, path: Path, *, context: typer.Context, model: str | None = None
) -> None:
    """Write a policy, with the command line that made it and the model."""
    known = {} if model is None else {"model": model}
    provenance = dict(policy.provenance) | {"command": command_line(context)} | known
    replace(policy, provenance=provenance).save(path)


def describe_profile(policy: Policy) -> str:
    """What the profile of a policy holds, in words."""
    profile = policy.profile
    if profile is None:
        return "no profile"
    runs = f"{profile.num_runs} run{'' if profile.num_runs == 1 else 's'}"
    return f"a profile of {runs} of {profile.num_steps} steps"


def print_plan(plan: FittedPlan) -> None:
    """Print what a plan does, in a few lines."""
    computed, reused = len(plan.compute_steps), len(plan.reuse_steps)
    print_fact("method", plan.method)
    print_fact(
        "steps",
        f"{plan.num_steps}: {computed} computed, {reused} reused "
        f"({plan.speedup:.2f} times fewer computed steps)",
    )
    print_fact("step mask", draw_mask(plan.compute_steps, plan.num_steps))
    if plan.measured_error is not None:
        print_fact("error", f"final latent {plan.measured_error:.3g} from the full run's")
    elif plan.predicted_error is not None:
        print_fact("predicted", f"final latent {plan.predicted_error:.3g} from the full run's")


def print_validation(rows: Sequence[ValidationRow]) -> None:
    """Print what was measured on held-out prompts."""
    cells = [
        [one_line(r.method), str(r.computed_steps), f"{r.speedup:.2f}x", decibels(r.psnr)]
        for r in rows
    ]
    count = rows[0].prompts
    title = f"Measured on {count} held-out prompt{'' if count == 1 else 's'}, to the full run"
    print_table(title, ["", "computed steps", "speed-up", "PSNR"], cells)


def print_verdicts(policy: Policy, plans: Sequence[FittedPlan], path: Path) -> int:
    """Print what was measured of some plans and where the policy is; returns the exit code."""
    from ertacache.calibration.validate import missed_target, recommend

    good = 0
    for plan in plans:
        print_plan(plan)
        if not plan.validation:
            good += 1
            continue
        print_validation(plan.validation)
        verdict, missed = recommend(plan.validation), missed_target(plan)
        for sentence in filter(None, (str(verdict), missed)):
            print_line(sentence)
        good += verdict.recommended and missed is None
    calls = policy.provenance.get("network calls")
    if calls is not None:
        print_fact("NFE", f"{calls}, one prompt on one step each")
    verdict_word = "" if good else ", not recommended"
    print_line(f"{path}: the policy{verdict_word}")
    return 0 if good else NOT_RECOMMENDED
