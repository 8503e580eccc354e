"""A policy as the commands save and print it: what it does, what was measured, the verdict.

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
    from ertacache.formats.policy import Policy, ValidationRow

__all__ = [
    "NOT_RECOMMENDED",
    "print_policy",
    "print_validation",
    "print_verdict",
    "save_policy",
]

NOT_RECOMMENDED = 3
"""Exit code of a command whose policy is not recommended, or misses its target."""


def save_policy(policy: Policy, path: Path, *, context: typer.Context) -> None:
    """Write a policy, with the command line that made it."""
    provenance = dict(policy.provenance) | {"command": command_line(context)}
    replace(policy, provenance=provenance).save(path)


def print_policy(policy: Policy) -> None:
    """Print what a policy does, in a few lines."""
    computed, reused = len(policy.compute_steps), len(policy.reuse_steps)
    print_fact("method", policy.method)
    print_fact(
        "steps",
        f"{policy.num_steps}: {computed} computed, {reused} reused "
        f"({policy.speedup:.2f} times fewer computed steps)",
    )
    print_fact("step mask", draw_mask(policy.compute_steps, policy.num_steps))
    if policy.predicted_error is not None:
        print_fact("predicted", f"final latent {policy.predicted_error:.3g} from the full run's")


def print_validation(rows: Sequence[ValidationRow]) -> None:
    """Print what was measured on held-out prompts."""
    cells = [
        [one_line(r.method), str(r.computed_steps), f"{r.speedup:.2f}x", decibels(r.psnr)]
        for r in rows
    ]
    count = rows[0].prompts
    title = f"Measured on {count} held-out prompt{'' if count == 1 else 's'}, to the full run"
    print_table(title, ["", "computed steps", "speed-up", "PSNR"], cells)


def print_verdict(policy: Policy, path: Path) -> int:
    """Print what was measured and where the policy is; returns the exit code."""
    from ertacache.calibration.validate import missed_target, recommend

    print_policy(policy)
    print_validation(policy.validation)
    calls = policy.provenance.get("network calls")
    if calls is not None:
        print_fact("NFE", f"{calls}, one prompt on one step each")
    verdict, missed = recommend(policy.validation), missed_target(policy)
    for sentence in filter(None, (str(verdict), missed)):
        print_line(sentence)
    if not verdict.recommended:
        print_line(f"{path}: the policy, not recommended")
        return NOT_RECOMMENDED
    print_line(f"{path}: the policy" + ("" if missed is None else ", the closest of those tried"))
    return 0 if missed is None else NOT_RECOMMENDED
