"""``ertacache profile``: one full run per prompt, written to a profile as it grows."""

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
    readable_failures,
)
from ertacache.cli.options import CallOptions, Model, PromptOptions
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import describe_profile, profile_values
from ertacache.cli.writing import check_json, keeping_runs, open_output, parts_of, write_json

__all__ = ["EXAMPLES", "profile"]

EXAMPLES = (
    "ertacache profile emoji-flux -o profile.safetensors",
    "ertacache profile black-forest-labs/FLUX.1-dev --prompts prompts.txt --limit 16 --steps 30 "
    "--dtype bfloat16 -o flux-profile.safetensors",
    "ertacache profile emoji-flux --arg max_sequence_length=16 -o profile.safetensors",
)

ProfileOutput = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="The profile; an existing one is continued."
    ),
]


def profile(
    context: typer.Context,
    model: Model,
    output: ProfileOutput,
    *,
    prompts: PromptOptions,
    json: JsonFile = None,
    call: CallOptions,
) -> None:
    """Profile a model: one full run per prompt.

    The file is a policy without plans: generate takes it with any --speedup, and calibrate
    continues from it. Every run is saved as it ends; an interrupted profile continues where it
    stopped.
    """
    check_json(json)
    texts = choose_prompts(model, prompts.prompts, limit=prompts.limit)
    open_output(context, output)
    processes = processes_of(context)
    pipe, arguments = open_model(model, call, decoded=False, processes=processes)
    check_continued(output if processes.is_main else None, pipe, arguments, lora=call.lora)
    with keeping_runs(output, parts_of(output)), readable_failures(call), Stages() as stage:
        made = ertacache.profile(
            pipe,
            texts,
            seed=prompts.seed,
            batch_size=prompts.batch_size,
            path=output,
            progress=stage("profile"),
            provenance=provenance_of(context, model, call),
            processes=processes,
            **arguments,
        )
    print_line(f"{output}: {describe_profile(made)}")
    write_json(json, {"policy": str(output), "profile": profile_values(made)})
