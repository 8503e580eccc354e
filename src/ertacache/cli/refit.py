"""``ertacache refit``: add a plan to a policy, refitted in closed loop for other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ertacache
from ertacache.cli.console import Stages
from ertacache.cli.loading import open_model, read_prompts, readable_failures
from ertacache.cli.options import BatchSize, CallOptions
from ertacache.cli.policies import print_verdicts, save_policy
from ertacache.cli.writing import check_output

__all__ = ["EXAMPLES", "refit"]

EXAMPLES = (
    "ertacache refit policy.safetensors --speedup 5",
    "ertacache refit policy.safetensors --speedup 2 --steps 20 --height 48 --width 48",
    "ertacache refit policy.safetensors --model ./my-pipeline --compute-steps 8 -o new.safetensors",
)


def refit(
    context: typer.Context,
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy with a profile.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write; by default the same file."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="The model; by default the one it was calibrated for."
        ),
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(
            "--speedup",
            metavar="NUMBER",
            help="At least this many times fewer computed steps; by default that of the policy.",
        ),
    ] = None,
    compute_steps: Annotated[
        int | None,
        typer.Option("--compute-steps", metavar="N", min=2, help="This many computed steps."),
    ] = None,
    heldout: Annotated[
        Path | None,
        typer.Option("--heldout", metavar="FILE", help="Prompts to validate on; none by default."),
    ] = None,
    batch_size: BatchSize = 1,
    call: CallOptions,
) -> None:
    """Refit one more plan of a policy.

    For another speed-up, or for runs with other steps, sizes or arguments. Runs the prompts of the
    profile. Plans that are there stay; one for the same runs and budget is replaced.
    """
    from ertacache.core.plans import Target
    from ertacache.formats.policy import Policy

    Target(speedup, compute_steps)  # refuses both, and bad numbers
    known = Policy.load(policy)
    written = policy if output is None else output
    check_output(written)
    name = model or known.provenance.get("model")
    if name is None:
        raise ValueError("the policy does not say which model it is for: give it with --model")
    validated = None if heldout is None else read_prompts(heldout)
    pipe, arguments = open_model(name, call)
    with readable_failures(call), Stages() as stage:
        made = ertacache.refit(
            pipe,
            known,
            speedup=speedup,
            compute_steps=compute_steps,
            heldout=validated,
            batch_size=batch_size,
            stage=stage,
            **arguments,
        )
    save_policy(made, written, context=context)
    raise typer.Exit(print_verdicts(made, made.plans[-1:], written))
