"""The options that several commands share, and the values they stand for.

Knows no pipeline and no profile: an option is a name, a type and a sentence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = [
    "AdjustTimesteps",
    "Arguments",
    "BatchSize",
    "CallOptions",
    "ComputeSteps",
    "Device",
    "Dtype",
    "Frames",
    "Guidance",
    "Height",
    "Limit",
    "MaxError",
    "Method",
    "MinPsnr",
    "Model",
    "PromptsFile",
    "Rectify",
    "Reuse",
    "Seed",
    "Speedup",
    "Steps",
    "Threshold",
    "Width",
    "parse_arguments",
]

RESERVED = ("prompt", "generator", "output_type")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A bundled model, a folder with a pipeline, or a hub id."),
]
PromptsFile = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts, one per line.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use the first N prompts only.", metavar="N")
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", min=0, help="Seed of the first prompt; the others count up."
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", min=1, help="Prompts per call of the pipeline.")
]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", min=1, help="Sampling steps of a full run.")
]
Guidance = Annotated[
    float | None, typer.Option("--guidance", metavar="NUMBER", help="Guidance scale.")
]
Height = Annotated[
    int | None, typer.Option("--height", metavar="N", min=1, help="Height in pixels.")
]
Width = Annotated[int | None, typer.Option("--width", metavar="N", min=1, help="Width in pixels.")]
Frames = Annotated[
    int | None, typer.Option("--frames", metavar="N", min=1, help="Frames of a video.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Number type of the weights."),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where to run; by default cuda if it is there, otherwise cpu.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        help="Any further argument of the pipeline, JSON or text; may be given several times.",
    ),
]

Speedup = Annotated[
    float | None,
    typer.Option(
        "--speedup", metavar="NUMBER", help="At least this many times fewer computed steps."
    ),
]
ComputeSteps = Annotated[
    int | None,
    typer.Option("--compute-steps", metavar="N", min=1, help="This many computed steps."),
]
MaxError = Annotated[
    float | None,
    typer.Option(
        "--max-error",
        metavar="NUMBER",
        help="The fewest computed steps that are expected to stay within this.",
    ),
]
MinPsnr = Annotated[
    float | None,
    typer.Option(
        "--min-psnr",
        metavar="DB",
        help="The fewest computed steps that come this near to the full run, in dB.",
    ),
]
Method = Annotated[
    Literal["trajectory", "paper"],
    typer.Option("--method", help="Trajectory rectification, or the paper's method."),
]
Threshold = Annotated[
    float | None,
    typer.Option("--threshold", metavar="NUMBER", help="The paper's lambda; --method paper only."),
]
Reuse = Annotated[
    Literal["residual", "velocity"],
    typer.Option("--reuse", help="What a reused step returns; --method paper only."),
]
AdjustTimesteps = Annotated[
    bool,
    typer.Option(
        "--adjust-timesteps/--no-adjust-timesteps",
        help="Adjust the sigma table; --method paper only.",
    ),
]
Rectify = Annotated[
    bool,
    typer.Option("--rectify/--no-rectify", help="Rectify reused outputs; --method paper only."),
]


@dataclass(frozen=True)
class CallOptions:
    """What the command line says of the pipeline's call; None leaves it to the pipeline.

    Attributes:
        steps: sampling steps.
        guidance: guidance scale.
        height: in pixels.
        width: in pixels.
        frames: of a video.
        arguments: further arguments, each ``NAME=VALUE``.
    """

    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    arguments: tuple[str, ...] = ()

    def given(self) -> dict[str, Any]:
        """The pipeline's arguments that were given.

        Example:
            >>> CallOptions(steps=8, arguments=("true_cfg_scale=2.5",)).given()
            {'true_cfg_scale': 2.5, 'num_inference_steps': 8}
        """
        named = {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "height": self.height,
            "width": self.width,
            "num_frames": self.frames,
        }
        chosen = {name: value for name, value in named.items() if value is not None}
        return parse_arguments(self.arguments) | chosen


def parse_arguments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Take ``NAME=VALUE`` apart; a value that is not JSON is a text.

    Example:
        >>> parse_arguments(("max_sequence_length=16", "negative_prompt=a blurry picture"))
        {'max_sequence_length': 16, 'negative_prompt': 'a blurry picture'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"--arg takes NAME=VALUE, got {text!r}")
        if name in RESERVED:
            raise ValueError(f"--arg cannot set {name!r}: the command does")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
