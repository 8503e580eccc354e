"""``ertacache merge``: several profiles of one pipeline as one profile. Runs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ertacache.cli.console import print_line
from ertacache.cli.options import Force
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import describe_profile, profile_values
from ertacache.cli.writing import check_json, open_output, write_json

__all__ = ["EXAMPLES", "merge"]

EXAMPLES = ("ertacache merge part-1.safetensors part-2.safetensors -o all.safetensors",)


def merge(
    context: typer.Context,
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE", help="Profiles of the same pipeline.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The profile of all runs.")
    ],
    force: Force = False,
    json: JsonFile = None,
) -> None:
    """Merge profiles of one pipeline.

    They may be parts that were made on several machines. Plans are left out: they were made from a
    part of the runs.
    """
    from ertacache.formats.policy import Policy

    check_json(json)
    written = open_output(context, output, force=force)
    first, *others = [Policy.load(path) for path in profiles]
    merged = first.merge(*others)
    written.save(merged)
    print_line(f"{output}: {describe_profile(merged)}")
    write_json(json, {"policy": str(output), "profile": profile_values(merged)})
