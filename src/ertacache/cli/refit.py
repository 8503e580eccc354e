"""``ertacache refit``: add a plan to a policy, refitted in closed loop for other settings.

Exit code 3 means that the plan was measured and is not recommended; it is written all the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ertacache
from ertacache.cli.console import Stages
from ertacache.cli.group import processes_of
from ertacache.cli.loading import load_policy, open_model, read_prompts, readable_failures
from ertacache.cli.options import BatchSize, CallOptions, Force, RunBudget
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import describe_plan, print_verdicts, save_policy
from ertacache.cli.writing import check_json, keeping_runs, open_output, parts_of, write_json

if TYPE_CHECKING:
    from ertacache.formats.policy import Policy

__all__ = ["EXAMPLES", "refit"]

EXAMPLES = (
    "ertacache refit policy.safetensors --speedup 5",
    "ertacache refit policy.safetensors --speedup 2 --steps 20 --height 48 --width 48",
    "ertacache refit policy.safetensors --model ./my-pipeline --compute-steps 8 "
    "--heldout heldout.txt -o new.safetensors",
)

RefitOutput = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where to write; by default the same file."
    ),
]
ProfiledModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="The model; by default the one it was profiled with."
    ),
]


def refit(
    context: typer.Context,
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy with a profile.")],
    *,
    output: RefitOutput = None,
    model: ProfiledModel = None,
    budget: RunBudget,
    heldout: Annotated[
        Path | None,
        typer.Option("--heldout", metavar="FILE", help="Prompts to validate on; none by default."),
    ] = None,
    batch_size: BatchSize = 1,
    force: Force = False,
    json: JsonFile = None,
    call: CallOptions,
) -> None:
    """Refit one more plan of a policy.

    For another speed-up, or for runs with other steps, sizes or arguments; by default the speed-up
    of its first plan. Runs the prompts of the profile. Plans that are there stay; one for the same
    runs and as many computed steps is replaced. Finished runs are kept in a folder beside it until
    then: the same command continues from there. Exit code 3 means that it is not recommended.
    """
    from ertacache.integration.solve import profile_of

    check_json(json)
    known = load_policy(policy, budget.given())
    written = open_output(context, policy if output is None else output, force=force)
    if output is None and written.old is not None:
        known = written.old  # another process may have written it before the lock was taken
    profile_of(known)  # raises if it has none
    name = model or _model_of(known)
    written.check(known)
    unseen = None if heldout is None else read_prompts(heldout)
    processes, parts = processes_of(context), parts_of(written.path)
    loading: dict[str, Any] = {"decoded": unseen is not None, "processes": processes}
    if model is None and call.lora is None:
        call = replace(call, lora=known.provenance.get("lora"))
    pipe, arguments = open_model(name, call, policy=known, **loading)
    arguments = _without_theirs(arguments, known, call)
    with keeping_runs(parts), readable_failures(call), Stages() as stage:
        made = ertacache.refit(
            pipe,
            known,
            heldout=unseen,
            batch_size=batch_size,
            resume=parts,
            processes=processes,
            stage=stage,
            **budget.given(),
            **arguments,
        )
    save_policy(made, written, context=context, model=name, parts=parts)
    plans = [plan for plan in made.plans if plan not in known.plans]
    code = print_verdicts(plans, written.path)
    write_json(json, {"policy": str(written.path), "plans": [describe_plan(p) for p in plans]})
    raise typer.Exit(code)


def _without_theirs(arguments: dict[str, Any], policy: Policy, call: CallOptions) -> dict[str, Any]:
    """The arguments without those in which the profiled runs differ, unless they were given.

    A bundled model has values for some of them, and the runs have their own.
    """
    profile, given = policy.profile, call.given()
    runs = () if profile is None else profile.runs
    theirs = {name for run in runs for name, _ in run.arguments} - given.keys()
    return {name: value for name, value in arguments.items() if name not in theirs}


def _model_of(policy: Policy) -> str:
    name = policy.provenance.get("model", "")
    if not name or "\n" in name:  # merged profiles may name several, each a path of its machine
        raise ValueError("the policy does not say which model it is for: give it with --model")
    return name
