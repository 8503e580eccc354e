"""``ertacache solve``: add a plan to a policy from its profile. Loads and runs no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import ertacache
from ertacache.cli.console import Stages, print_line
from ertacache.cli.options import Force, PolicyOutput, TargetOptions, given_options
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import describe_plan, print_plan, save_policy
from ertacache.cli.writing import check_json, open_output, write_json

__all__ = ["EXAMPLES", "solve"]

EXAMPLES = (
    "ertacache solve profile.safetensors --speedup 2 -o policy.safetensors",
    "ertacache solve profile.safetensors --speedup 2 --speedup 3 -o policy.safetensors",
    "ertacache solve profile.safetensors --method paper --threshold 0.1 -o paper.safetensors",
)


def solve(
    context: typer.Context,
    profile: Annotated[
        Path, typer.Argument(metavar="POLICY", help="A policy with a profile, or a profile.")
    ],
    output: PolicyOutput,
    target: TargetOptions,
    force: Force = False,
    json: JsonFile = None,
) -> None:
    """Add plans to a policy, solved from its profile.

    No model is needed. generate and attach solve by themselves; this writes a plan down, to look at
    it, or for the paper's method. Give --speedup, --compute-steps, --min-psnr or --threshold.
    """
    from ertacache.formats.policy import Policy

    if not given_options(target.targets()):
        raise ValueError("give --speedup, --compute-steps, --min-psnr or --threshold")
    check_json(json)
    written = open_output(context, output, force=force)
    policy = known = Policy.load(profile)
    targets = list(_one_by_one(target.given()))
    with Stages() as stage:
        progress = stage("solve")  # of a profile alone it takes seconds
        for done, one in enumerate(targets, start=1):
            policy = ertacache.solve(policy, **one)
            progress(done, len(targets))
    save_policy(policy, written, context=context)
    plans = [plan for plan in policy.plans if plan not in known.plans]
    for plan in plans:
        print_plan(plan)
    print_line(f"{output}: the policy")
    if json is not None:  # the verdicts take a second to import
        write_json(json, {"policy": str(output), "plans": [describe_plan(p) for p in plans]})


def _one_by_one(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with each of several speed-ups or numbers of computed steps in turn."""
    name = "compute_steps" if given["speedup"] is None else "speedup"
    for value in given[name] or [None]:
        yield given | {name: value}
