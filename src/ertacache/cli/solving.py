"""``ertacache solve``: a policy for any wish from a saved profile. Loads and runs no model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ertacache.cli import options as opt
from ertacache.cli.console import say, say_fact, strip
from ertacache.cli.group import command_line
from ertacache.cli.loading import check_output

if TYPE_CHECKING:
    from ertacache.formats.policy import Policy

__all__ = ["EXAMPLES", "PolicyOutput", "save_policy", "say_policy", "solve"]

EXAMPLES = (
    "ertacache solve profile.safetensors --speedup 2 -o policy.safetensors",
    "ertacache solve profile.safetensors --compute-steps 10 -o policy.safetensors",
    "ertacache solve profile.safetensors --method paper --threshold 0.1 -o paper.safetensors",
)

PolicyOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The policy to write.")
]


def solve(
    context: typer.Context,
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile.")],
    output: PolicyOutput,
    speedup: opt.Speedup = None,
    compute_steps: opt.ComputeSteps = None,
    max_error: opt.MaxError = None,
    min_psnr: opt.MinPsnr = None,
    method: opt.Method = "trajectory",
    threshold: opt.Threshold = None,
    reuse: opt.Reuse = "residual",
    adjust_timesteps: opt.AdjustTimesteps = True,
    rectify: opt.Rectify = True,
) -> None:
    """Make a policy from a profile.

    No model is needed. Give exactly one of --speedup, --compute-steps, --max-error, --min-psnr and
    --threshold. Without the model what an error does to a picture is a guess: --min-psnr is rough
    here, and measured by calibrate.
    """
    from ertacache import calibration
    from ertacache.formats.policy import Policy
    from ertacache.formats.profile import Profile

    check_output(output, Policy)
    policy = calibration.solve(
        Profile.load(profile),
        speedup=speedup,
        compute_steps=compute_steps,
        max_error=max_error,
        min_psnr=min_psnr,
        method=method,
        threshold=threshold,
        reuse=reuse,
        adjust_timesteps=adjust_timesteps,
        rectify=rectify,
    )
    save_policy(policy, output, context=context)
    say_policy(policy)
    say(f"{output}: the policy, not yet measured on held-out prompts")


def save_policy(policy: Policy, path: Path, *, context: typer.Context) -> None:
    """Write a policy, with the command line that made it."""
    provenance = dict(policy.provenance) | {"command": command_line(context)}
    replace(policy, provenance=provenance).save(path)


def say_policy(policy: Policy) -> None:
    """Print what a policy does, in a few lines."""
    computed, reused = len(policy.compute_steps), len(policy.reuse_steps)
    say_fact("method", policy.method)
    say_fact(
        "steps",
        f"{policy.num_steps}: {computed} computed, {reused} reused "
        f"({policy.speedup:.2f} times fewer computed steps)",
    )
    say_fact("schedule", strip(policy.compute_steps, policy.num_steps))
    if policy.predicted_error is not None:
        say_fact("predicted", f"final latent {policy.predicted_error:.3g} from the full run's")
