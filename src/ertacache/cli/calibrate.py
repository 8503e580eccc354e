"""``ertacache calibrate``: profile, try, solve, refit and validate in one command.

Exit code 3 means that no plan is recommended, or that the target PSNR is missed; the policy is
written all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ertacache
from ertacache.cli.console import Stages, print_line
from ertacache.cli.group import processes_of
from ertacache.cli.loading import (
    check_continued,
    choose_prompts,
    open_model,
    provenance_of,
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
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import describe_plan, print_verdicts, save_policy
from ertacache.cli.writing import (
    Output,
    check_json,
    keeping_runs,
    open_output,
    parts_of,
    write_json,
)

__all__ = ["EXAMPLES", "calibrate"]

EXAMPLES = (
    "ertacache calibrate emoji-flux -o policy.safetensors",
    "ertacache calibrate emoji-flux --speedup 2 --speedup 5 -o policy.safetensors",
    "ertacache calibrate ./my-pipeline --prompts prompts.txt --heldout heldout.txt --steps 50 "
    "--compute-steps 20 -o policy.safetensors --profile profile.safetensors",
    "ertacache calibrate emoji-flux --min-psnr 45 -o policy.safetensors",
    "ertacache calibrate emoji-flux --arg true_cfg_scale=[2,4,6] -o policy.safetensors",
    "ertacache calibrate emoji-flux -o policy.safetensors --push user/repo",
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
Validate = Annotated[
    bool,
    typer.Option(
        "--validate/--no-validate",
        help="Measure the plans on held-out prompts; otherwise calibrate on all of them.",
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
Push = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="USER/REPO",
        help="Also upload the policy to the hub, with a model card; the token is that of HF_TOKEN "
        "or hf auth login.",
    ),
]
Private = Annotated[
    bool, typer.Option("--private", help="Make a new repository of --push a private one.")
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
    validate: Validate = True,
    profile: ProfileFile = None,
    push: Push = None,
    private: Private = False,
    force: Force = False,
    json: JsonFile = None,
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
    _check_push(push, private)
    check_json(json)
    validated = _heldout(heldout, validate=validate)
    written = _open_files(context, output, profile, force=force)
    processes, parts = processes_of(context), parts_of(output)
    pipe, arguments = open_model(model, call, processes=processes)
    check_continued(profile if processes.is_main else None, pipe, arguments, lora=call.lora)
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
            provenance=provenance_of(context, model, call),
            stage=stage,
            **target.given(),
            **arguments,
        )
    save_policy(policy, written, context=context, model=model, parts=parts)
    evaluations = policy.provenance.get("network calls")
    code = print_verdicts(policy.plans, output, evaluations=evaluations)
    plans = [describe_plan(plan) for plan in policy.plans]
    write_json(json, {"policy": str(output), "plans": plans})
    if push is not None and processes.is_main:
        _push(output, push, model, private=private or None)
    raise typer.Exit(code)


def _check_push(repo: str | None, private: bool) -> None:
    """Raise before any work if the policy could not be uploaded."""
    if repo is not None:
        from ertacache.hub import check_push

        check_push(repo, private=private)
    elif private:
        raise ValueError("--private is of a new repository: give its name with --push")


def _push(path: Path, repo: str, model: str, *, private: bool | None) -> None:
    """Upload the policy that was written; if that fails, it is still there."""
    from ertacache.formats.policy import Policy, PolicyError
    from ertacache.models.zoo import is_hub_id

    base = model if is_hub_id(model) else None
    try:
        place = Policy.load(path).push_to_hub(repo, private=private, base_model=base)
    except PolicyError as cause:
        again = f'Policy.load("{path}").push_to_hub("{repo}")'
        raise ValueError(f"{cause}; the policy is in {path}: upload it with {again}") from cause
    print_line(f"{place}: uploaded")


def _heldout(path: Path | None, *, validate: bool) -> list[str] | None:
    """The prompts to validate on; None holds some of the others out."""
    if validate:
        return None if path is None else read_prompts(path)
    if path is not None:
        raise ValueError("--no-validate measures nothing: leave --heldout out")
    return []


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
