"""``ertacache profile`` and ``ertacache merge``: make profiles and put them together.

Knows where profiles go, not what is in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ertacache.cli import options as opt
from ertacache.cli.console import Stages, say
from ertacache.cli.group import Interrupted, command_line
from ertacache.cli.loading import check_continued, check_output, choose_prompts, open_model, running

__all__ = ["MERGE_EXAMPLES", "PROFILE_EXAMPLES", "merge", "profile"]

PROFILE_EXAMPLES = (
    "ertacache profile emoji-flux -o profile.safetensors",
    "ertacache profile black-forest-labs/FLUX.1-dev --prompts prompts.txt --limit 16 --steps 30 "
    "--dtype bfloat16 -o flux-profile.safetensors",
    "ertacache profile emoji-flux --arg max_sequence_length=16 -o profile.safetensors",
)
MERGE_EXAMPLES = ("ertacache merge part-1.safetensors part-2.safetensors -o all.safetensors",)

ProfileOutput = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="The profile; if it is there, it is continued."
    ),
]


def profile(
    context: typer.Context,
    model: opt.Model,
    output: ProfileOutput,
    prompts: opt.PromptsFile = None,
    limit: opt.Limit = None,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    height: opt.Height = None,
    width: opt.Width = None,
    frames: opt.Frames = None,
    seed: opt.Seed = 0,
    batch_size: opt.BatchSize = 1,
    dtype: opt.Dtype = "float32",
    device: opt.Device = None,
    arg: opt.Arguments = None,
) -> None:
    """Profile a model: one full run per prompt.

    Every run is written down as it ends; an interrupted profile goes on where it stopped.
    """
    given = opt.CallOptions(steps, guidance, height, width, frames, tuple(arg or ()))
    texts = choose_prompts(model, prompts, limit=limit)
    from ertacache import calibration
    from ertacache.formats.profile import Profile

    check_output(output, Profile)
    pipe, call = open_model(model, given, dtype=dtype, device=device)
    check_continued(output, pipe, call)
    try:
        with running(given), Stages() as stage:
            known = calibration.profile(
                pipe,
                texts,
                seed=seed,
                batch_size=batch_size,
                path=output,
                progress=stage("profile"),
                provenance={"command": command_line(context)},
                **call,
            )
    except KeyboardInterrupt as error:
        raise Interrupted(kept(output)) from error
    runs = f"{known.num_prompts} run{'' if known.num_prompts == 1 else 's'}"
    say(f"{output}: a profile of {runs} of {known.num_steps} steps")


def kept(path: Path | None) -> str:
    """What is left of an interrupted profile."""
    if path is None or not path.exists():
        return "nothing was written"
    return f"the runs so far are in {path}; the same command goes on from there"


def merge(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE", help="Profiles of the same pipeline.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The profile of all runs.")
    ],
) -> None:
    """Put profiles of one pipeline together.

    They may be parts that were made on several machines.
    """
    from ertacache.formats.profile import Profile

    check_output(output, Profile)
    first, *others = [Profile.load(path) for path in profiles]
    whole = first.merge(*others)
    whole.save(output)
    say(f"{output}: a profile of {whole.num_prompts} runs of {whole.num_steps} steps")
