"""The options that several commands share.

A bundle is a frozen dataclass whose fields are options. A command takes a bundle as one parameter;
``expand_bundles`` gives the command line the options in it. No pipeline and no file is opened here.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

__all__ = [
    "BatchSize",
    "CallOptions",
    "Force",
    "Model",
    "PolicyOutput",
    "PromptOptions",
    "PromptsFile",
    "RunBudget",
    "RunTarget",
    "Seed",
    "Speedups",
    "Steps",
    "TargetOptions",
    "expand_bundles",
    "given_options",
    "parse_arguments",
]

MAX_SEED = 10**18  # 64 bits, with space for those that count up
MAX_STEPS = 10_000
RESERVED = ("prompt", "generator", "output_type")
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "speedup": ("a finite number of at least 1", lambda number: 1 <= number < math.inf),
    "compute_steps": ("at least 2", lambda number: number >= 2),
    "min_psnr": ("a positive number of dB", lambda number: 0 < number < math.inf),
    "threshold": ("a finite number of at least 0", lambda number: 0 <= number < math.inf),
    "guidance": ("a finite number", math.isfinite),
}
"""What a number must be, in words and as a rule; NaN is none of them."""


def _bundled_names(incomplete: str) -> list[str]:
    from ertacache.models.zoo import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundled model, a folder with a pipeline, or a hub id.",
        autocompletion=_bundled_names,
    ),
]
PolicyOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The policy to write.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite the file even if measured work is lost.")
]
PromptsFile = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts, one per line.")
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        max=MAX_SEED,
        help="Seed of the first prompt; the others count up.",
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", min=1, help="Prompts per call of the pipeline.")
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", metavar="N", min=1, max=MAX_STEPS, help="Sampling steps of a full run."
    ),
]


@dataclass(frozen=True)
class CallOptions:
    """How the pipeline is called and loaded; None leaves a value to the pipeline.

    Attributes:
        steps: sampling steps.
        guidance: guidance scale.
        height: in pixels.
        width: in pixels.
        frames: of a video.
        dtype: number type of the weights.
        device: where the pipeline runs; None takes cuda if there is one.
        offload: what is kept in memory of the CPU until it is used.
        lora: a safetensors file, a folder or a hub id; None loads none.
        arguments: further arguments of the call, each ``NAME=VALUE``.

    Raises:
        ValueError: the guidance scale is not finite, or the file of the LoRA is of another kind.
    """

    steps: Steps = None
    guidance: Annotated[
        float | None, typer.Option("--guidance", metavar="NUMBER", help="Guidance scale.")
    ] = None
    height: Annotated[
        int | None, typer.Option("--height", metavar="N", min=1, help="Height in pixels.")
    ] = None
    width: Annotated[
        int | None, typer.Option("--width", metavar="N", min=1, help="Width in pixels.")
    ] = None
    frames: Annotated[
        int | None, typer.Option("--frames", metavar="N", min=1, help="Frames of a video.")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Number type of the weights."),
    ] = "float32"
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Where to run; by default cuda if available, otherwise cpu.",
        ),
    ] = None
    offload: Annotated[
        Literal["none", "model", "sequential"],
        typer.Option(
            "--offload",
            help="Keep in CPU memory, until it is used: nothing, every model, or every layer.",
        ),
    ] = "none"
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora", metavar="LORA", help="Load a LoRA first: a .safetensors file or a hub id."
        ),
    ] = None
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="A further argument of the pipeline, JSON or a string; may be repeated.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse before any work what the command line itself cannot check."""
        _check_numbers("guidance", self.guidance)
        if self.lora is not None:
            file = Path(self.lora)
            if file.is_file() and file.suffix != ".safetensors":
                raise ValueError(f"{self.lora!r} may run code: convert it to a .safetensors file")

    def given(self) -> dict[str, Any]:
        """The pipeline's arguments that were given.

        Example:
            >>> CallOptions(steps=8, arguments=["true_cfg_scale=2.5"]).given()
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
        further = parse_arguments(self.arguments or ())
        for name in chosen:
            if name in further:
                raise ValueError(f"{name} is given twice: by an option of its own and by --arg")
        return further | chosen

    def __str__(self) -> str:
        """The pipeline's arguments as they were given on the command line."""
        names = ("steps", "guidance", "height", "width", "frames")
        values = [(name, getattr(self, name)) for name in names]
        values += [("arg", text) for text in self.arguments or ()]
        return " ".join(f"--{name} {value}" for name, value in values if value is not None)


@dataclass(frozen=True)
class PromptOptions:
    """The calibration prompts and how they are run.

    Attributes:
        prompts: file with one prompt per line; None takes the prompts of a bundled model.
        limit: use only so many of them.
        seed: seed of the first prompt; the others count up.
        batch_size: prompts per call of the pipeline.
    """

    prompts: PromptsFile = None
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Use only the first N prompts.", metavar="N"),
    ] = None
    seed: Seed = 0
    batch_size: BatchSize = 1


Speedups = Annotated[
    list[float] | None,
    typer.Option(
        "--speedup",
        metavar="NUMBER",
        help="At least this many times fewer computed steps; may be repeated.",
    ),
]
Speedup = Annotated[
    float | None,
    typer.Option(
        "--speedup", metavar="NUMBER", help="At least this many times fewer computed steps."
    ),
]
StepCounts = Annotated[
    list[int] | None,
    typer.Option("--compute-steps", metavar="N", help="This many computed steps; may be repeated."),
]
StepCount = Annotated[
    int | None, typer.Option("--compute-steps", metavar="N", help="This many computed steps.")
]
MinPsnr = Annotated[
    float | None,
    typer.Option(
        "--min-psnr",
        metavar="DB",
        help="The fewest computed steps with this PSNR to the full run, in dB.",
    ),
]


@dataclass(frozen=True)
class RunBudget:
    """How many steps a run computes, given in one of two ways, or not at all.

    Attributes:
        speedup: at least this many times fewer computed steps.
        compute_steps: number of computed steps.

    Raises:
        ValueError: there are both, or one is out of range.
    """

    speedup: Speedup = None
    compute_steps: StepCount = None

    def __post_init__(self) -> None:
        """Refuse what cannot be, with the names of the options."""
        _check_targets(vars(self))

    def given(self) -> dict[str, Any]:
        """The budget, as ``ertacache.refit`` names it."""
        return asdict(self)


@dataclass(frozen=True)
class RunTarget:
    """What a run is to reach, at most one of the three.

    Attributes:
        speedup: at least this many times fewer computed steps.
        compute_steps: number of computed steps.
        min_psnr: PSNR to the full run, in dB.

    Raises:
        ValueError: there is more than one, or it is out of range.
    """

    speedup: Speedup = None
    compute_steps: StepCount = None
    min_psnr: MinPsnr = None

    def __post_init__(self) -> None:
        """Refuse what cannot be, with the names of the options."""
        _check_targets(vars(self))

    def given(self) -> dict[str, Any]:
        """The target, as ``ertacache.attach`` names it."""
        return asdict(self)


@dataclass(frozen=True)
class TargetOptions:
    """The targets of a calibration, of one kind, and its method.

    Attributes:
        speedup: at least so many times fewer computed steps.
        compute_steps: numbers of computed steps.
        min_psnr: PSNR to the full run, in dB.
        method: trajectory rectification, or the paper's method.
        threshold: the paper's lambda; like the rest for the paper's method only.
        reuse: what a reused step returns.
        adjust_timesteps: adjust the sigma schedule.
        rectify: rectify reused outputs.

    Raises:
        ValueError: there are several kinds of targets, or the method does not support one.
    """

    speedup: Speedups = None
    compute_steps: StepCounts = None
    min_psnr: MinPsnr = None
    method: Annotated[
        Literal["trajectory", "paper"],
        typer.Option("--method", help="Trajectory rectification, or the paper's method."),
    ] = "trajectory"
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold", metavar="NUMBER", help="The paper's lambda; --method paper only."
        ),
    ] = None
    reuse: Annotated[
        Literal["residual", "velocity"],
        typer.Option("--reuse", help="What a reused step returns; --method paper only."),
    ] = "residual"
    adjust_timesteps: Annotated[
        bool,
        typer.Option(
            "--adjust-timesteps/--no-adjust-timesteps",
            help="Adjust the sigma schedule; --method paper only.",
        ),
    ] = True
    rectify: Annotated[
        bool,
        typer.Option("--rectify/--no-rectify", help="Rectify reused outputs; --method paper only."),
    ] = True

    def __post_init__(self) -> None:
        """Refuse what no method can do, with the names of the options."""
        _check_targets(self.targets())
        if self.method == "paper" and self.min_psnr is not None:
            raise ValueError("the paper's method predicts no error: give --speedup or --threshold")
        if self.method != "paper" and self.threshold is not None:
            raise ValueError("--threshold needs --method paper; otherwise give --speedup")

    def targets(self) -> dict[str, Any]:
        """The targets without the method, as ``calibration`` names them."""
        names = ("speedup", "compute_steps", "min_psnr", "threshold")
        return {name: getattr(self, name) for name in names}

    def given(self) -> dict[str, Any]:
        """The targets and the method, as ``calibration`` names them."""
        return asdict(self)


def given_options(targets: Mapping[str, Any]) -> list[str]:
    """The options of the targets that were given.

    Example:
        >>> given_options(RunTarget(min_psnr=45).given())
        ['--min-psnr']
    """
    return [_option(name) for name, value in targets.items() if value is not None]


def _check_targets(targets: Mapping[str, Any]) -> None:
    """Raise if there are targets of several kinds, or numbers out of range."""
    options = given_options(targets)
    if len(options) > 1:
        raise ValueError(f"give one kind of target, not {' and '.join(options)}")
    for name, value in targets.items():
        _check_numbers(name, value)


def _check_numbers(name: str, value: float | list[float] | None) -> None:
    words, holds = _RANGES[name]
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if number is not None and not holds(number):
            raise ValueError(f"{_option(name)} must be {words}, got {number:g}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Split each ``NAME=VALUE``; a value that is not JSON is a string.

    Example:
        >>> parse_arguments(["max_sequence_length=16", "negative_prompt=a blurry image"])
        {'max_sequence_length': 16, 'negative_prompt': 'a blurry image'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"--arg takes NAME=VALUE, got {text!r}")
        if name in RESERVED:
            raise ValueError(f"--arg cannot set {name!r}: the command does")
        if name in found:
            raise ValueError(f"{name} is given twice by --arg")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        if not _all_finite(found[name]):
            raise ValueError(f"--arg takes finite numbers, got {text!r}")
    return found


def _all_finite(value: Any) -> bool:
    """Whether no number in a JSON value is NaN or infinite, which Python's parser would take."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def expand_bundles(command: Callable[..., None]) -> Callable[..., None]:
    """The command as the command line sees it: every bundle replaced by the options in it.

    Example:
        >>> def command(model: Model, call: CallOptions) -> None:
        ...     print(model, call.steps)
        >>> expanded = expand_bundles(command)
        >>> list(inspect.signature(expanded).parameters)[:4]
        ['model', 'steps', 'guidance', 'height']
        >>> expanded(model="emoji-flux", **(asdict(CallOptions()) | {"steps": 8}))
        emoji-flux 8
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    bundles: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if is_dataclass(parameter.annotation)
    }
    options = {name: inspect.signature(bundles[name], eval_str=True) for name in bundles}
    shown: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in bundles:
            shown += options[name].parameters.values()
        else:
            shown.append(parameter)

    def run(**values: Any) -> None:
        built = {
            name: bundle(**{option: values.pop(option) for option in options[name].parameters})
            for name, bundle in bundles.items()
        }
        command(**values, **built)

    # Keyword-only, so that what is required may follow what is not.
    signature = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shown]
    expanded: Any = run
    expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
    expanded.__signature__ = inspect.Signature(signature)
    expanded.__annotations__ = {each.name: each.annotation for each in shown}
    return run
