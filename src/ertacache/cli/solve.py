"""``ertacache solve``: a policy for any target from a saved profile. Loads and runs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ertacache
from ertacache.cli.console import print_line
from ertacache.cli.options import PolicyOutput, TargetOptions
from ertacache.cli.policies import print_policy, save_policy
from ertacache.cli.writing import check_output

__all__ = ["EXAMPLES", "solve"]

EXAMPLES = (
    "ertacache solve profile.safetensors --speedup 2 -o policy.safetensors",
    "ertacache solve profile.safetensors --compute-steps 10 -o policy.safetensors",
    "ertacache solve profile.safetensors --method paper --threshold 0.1 -o paper.safetensors",
)


def solve(
    context: typer.Context,
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile.")],
    output: PolicyOutput,
    target: TargetOptions,
) -> None:
    """Make a policy from a profile.

    No model is needed. Give exactly one of --speedup, --compute-steps, --max-error, --min-psnr and
    --threshold. Without the model the PSNR is only estimated: --min-psnr is rough here, and
    measured by calibrate.
    """
    from ertacache.formats.policy import Policy
    from ertacache.formats.profile import Profile

    check_output(output, Policy)
    policy = ertacache.solve(Profile.load(profile), **target.given())
    save_policy(policy, output, context=context)
    print_policy(policy)
    print_line(f"{output}: the policy, not yet measured on held-out prompts")
