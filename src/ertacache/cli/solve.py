"""``ertacache solve``: add a plan to a policy from its profile. Loads and runs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ertacache
from ertacache.cli.console import print_line
from ertacache.cli.options import PolicyOutput, TargetOptions
from ertacache.cli.policies import print_plan, save_policy
from ertacache.cli.writing import check_output

__all__ = ["EXAMPLES", "solve"]

EXAMPLES = (
    "ertacache solve profile.safetensors --speedup 2 -o policy.safetensors",
    "ertacache solve profile.safetensors --speedup 2 --speedup 4 -o policy.safetensors",
    "ertacache solve profile.safetensors --method paper --threshold 0.1 -o paper.safetensors",
)


def solve(
    context: typer.Context,
    profile: Annotated[
        Path, typer.Argument(metavar="POLICY", help="A policy with a profile, or a profile.")
    ],
    output: PolicyOutput,
    target: TargetOptions,
) -> None:
    """Add plans to a policy, solved from its profile.

    No model is needed. generate and attach solve by themselves; this writes a plan down, to look at
    it, or for the paper's method. Give --speedup, --compute-steps, --min-psnr or --threshold.
    """
    from ertacache.formats.policy import Policy

    check_output(output)
    policy = Policy.load(profile)
    before = len(policy.plans)
    options = target.given()
    speedups, counts = options.pop("speedup"), options.pop("compute_steps")
    wanted = [{"speedup": value} for value in speedups or ()]
    wanted += [{"compute_steps": value} for value in counts or ()]
    for budget in wanted or [{}]:
        policy = ertacache.solve(policy, **(options | budget))
    save_policy(policy, output, context=context)
    for plan in policy.plans[min(before, len(policy.plans) - 1) :]:
        print_plan(plan)
    print_line(f"{output}: the policy; its new plans are not yet measured on held-out prompts")
