"""``ertacache calibrate``: profile, try, solve, refit and validate in one command.

Exit code 3 means that no plan is recommended, or that the target PSNR is missed; the policy is
written all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ertacache
from ertacache.cli.console import Stages
from ertacache.cli.group import command_line, processes_of
from ertacache.cli.loading import (
    check_continued,
    choose_prompts,
    open_model,
    read_prompts,
    readable_failures,
)
from ertacache.cli.options import (
    CallOptions,
    Force,
    Model,
    PolicyOutput,
    PromptOptions,
    TargetOptions,
)
from ertacache.cli.policies import print_verdicts, save_policy
from ertacache.cli.writing import Output, keeping_runs, open_output, parts_folder

__all__ = ["EXAMPLES", "calibrate"]

EXAMPLES = (
    "ertacache calibrate emoji-flux -o policy.safetensors",
    "ertacache calibrate emoji-flux --speedup 2 --speedup 5 -o policy.safetensors",
    "ertacache calibrate ./my-pipeline --prompts prompts.txt --heldout heldout.txt --steps 50 "
    "--compute-steps 20 -o policy.safetensors --profile profile.safetensors",
    "ertacache calibrate emoji-flux --min-psnr 45 -o policy.safetensors",
    "ertacache calibrate emoji-flux --arg true_cfg_scale=[2,4,6] -o policy.safetensors",
    "ertacache calibrate emoji-flux --limit 8 --method paper --speedup 2 -o paper.safetensors",
)

Heldout = Annotated[
    Path | None,
    typer.Option(
        "--heldout",
        metavar="FILE",
        help="Prompts to validate on; by default a quarter of the prompts is held out.",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="Keep the profile; an existing one is continued."
    ),
]
Refit = Annotated[
    bool,
    typer.Option(
        "--refit/--no-refit",
        help="Refit in closed loop; the paper's method: calibrate on the network.",
    ),
]
RefitPrompts = Annotated[
    int,
    typer.Option(
        "--refit-prompts",
        metavar="N",
        min=1,
        help="Refit on the first N prompts, --batch-size of them per call of the network.",
    ),
]


def calibrate(
    context: typer.Context,
    model: Model,
    output: PolicyOutput,
    *,
    target: TargetOptions,
    refit: Refit = True,
    refit_prompts: RefitPrompts = 32,
    heldout: Heldout = None,
    profile: ProfileFile = None,
    force: Force = False,
    prompts: PromptOptions,
    call: CallOptions,
) -> None:
    """Make a policy for a model and measure it.

    The policy serves every speed-up, number of steps and size. Those of --speedup (2 and 3 if none
    is given), --compute-steps or --min-psnr are refitted on the model and validated on held-out
    prompts. An --arg that is a list of values spreads the prompts over them. Finished runs are kept
    in a folder beside the policy until it is written: the same command continues from there, with
    any number of processes. Exit code 3 means that no plan is recommended, or --min-psnr is missed.
    """
    texts = choose_prompts(model, prompts.prompts, limit=prompts.limit)
    validated = None if heldout is None else read_prompts(heldout)
    written = _open_files(context, output, profile, force=force)
    processes, parts = processes_of(context), parts_folder(output)
    pipe, arguments = open_model(model, call, processes=processes)
    check_continued(profile if processes.is_main else None, pipe, arguments)
    with keeping_runs(profile, parts), readable_failures(call), Stages() as stage:
        policy = ertacache.calibrate(
            pipe,
            texts,
            heldout=validated,
            seed=prompts.seed,
            batch_size=prompts.batch_size,
            refit=refit,
            refit_prompts=refit_prompts,
            profile_path=profile,
            resume=parts,
            processes=processes,
            provenance={"command": command_line(context), "model": model},
            stage=stage,
            **target.given(),
            **arguments,
        )
    save_policy(policy, written, context=context, model=model)
    evaluations = policy.provenance.get("network calls")
    raise typer.Exit(print_verdicts(policy.plans, output, evaluations=evaluations))


def _open_files(
    context: typer.Context, output: Path, profile: Path | None, *, force: bool
) -> Output:
    """Raise before any work unless both files can be written, and are two files."""
    written = open_output(context, output, force=force)
    if profile is not None:
        if profile.resolve() == output.resolve():
            raise ValueError("the policy and the profile must be different files")
        open_output(context, profile)
    written.check(None)
    return written
