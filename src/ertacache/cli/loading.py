"""What a command loads before it begins: the pipeline, its arguments, prompts, policies.

Whatever is wrong with them is reported here as a ``ValueError``, before any work is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ertacache.cli.console import Stages
from ertacache.cli.group import command_line
from ertacache.cli.options import CallOptions, given_options
from ertacache.distributed import ALONE, Processes
from ertacache.integration.sizes import check_size

if TYPE_CHECKING:
    from ertacache.formats.policy import Policy

__all__ = [
    "LoraError",
    "check_continued",
    "choose_prompts",
    "load_lora",
    "load_policy",
    "open_model",
    "provenance_of",
    "read_prompts",
    "readable_failures",
]

MAX_FILE = 64 << 20  # bytes of a file of prompts
MAX_LINE = 10_000  # characters of a prompt
MAX_PROMPTS = 10_000  # of a profile, whose own constant is not read here: that would import torch
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class LoraError(ValueError):
    """Raised for a LoRA that cannot be loaded into a pipeline."""


def read_prompts(path: Path) -> list[str]:
    """The prompts of a text file, one per line; empty lines are skipped.

    Only newlines separate prompts: other line breaks of Unicode are characters of a prompt.
    """
    place = f"prompts from {str(path)!r}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise ValueError(f"cannot read {place}: it has more than {MAX_FILE >> 20} MB")
        text = content.decode("utf-8-sig")
    except OSError as cause:
        raise ValueError(f"cannot read {place}: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise ValueError(f"cannot read {place}: it is not UTF-8") from cause
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise ValueError(
                f"cannot read {place}: line {number} has {len(line):,} characters, more than the "
                f"limit of {MAX_LINE:,}"
            )
    prompts = [line.strip(" \t\r") for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"there is no prompt in {str(path)!r}")
    return prompts


def choose_prompts(model: str, path: Path | None, *, limit: int | None = None) -> list[str]:
    """The prompts to calibrate with: those of the file, or the ones that come with the model."""
    from ertacache.models.zoo import MODELS, load_prompts

    if path is not None:
        prompts = read_prompts(path)
    elif model in MODELS:
        prompts = load_prompts(model, "calibration")
    else:
        raise ValueError(f"{model!r} comes with no prompts: give a file with --prompts")
    chosen = prompts[:limit]
    if len(chosen) > MAX_PROMPTS:
        raise ValueError(
            f"{str(path)!r} has {len(chosen):,} prompts, and a profile holds at most "
            f"{MAX_PROMPTS:,} runs: give --limit"
        )
    return chosen


def check_continued(
    path: Path | None, pipe: Any, arguments: dict[str, Any], *, lora: str | None
) -> None:
    """Raise if ``path`` is a profile of another pipeline, with another LoRA, or of another call."""
    if path is None or not path.exists():
        return
    from ertacache.calibration.profile import check_continued
    from ertacache.calibration.session import Session
    from ertacache.formats.policy import Policy, PolicyError

    try:
        known = Policy.load(path)
        was = known.provenance.get("lora")
        if was != lora:
            made = "no LoRA" if was is None else f"--lora {was}"
            raise PolicyError(f"the profile there cannot be continued: it was made with {made}")
        check_continued(known, Session(pipe, arguments))
    except PolicyError as cause:
        raise ValueError(f"{str(path)!r}: {cause}") from cause


def load_policy(path: Path, targets: Mapping[str, Any]) -> Policy:
    """A policy of a file or the hub; raise if it has no plan, and there is no target for one.

    Args:
        path: the file, or ``hub:user/repo``.
        targets: those of the command, None where one was not given.
    """
    from ertacache.hub import open_policy

    policy = open_policy(path)
    if not policy.plans and not given_options(targets):
        *others, last = given_options(dict.fromkeys(targets, True))
        options = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{str(path)!r} is a profile and holds no plan: give {options}")
    return policy


def open_model(
    model: str,
    options: CallOptions,
    *,
    policy: Policy | None = None,
    decoded: bool = True,
    processes: Processes = ALONE,
) -> tuple[Any, dict[str, Any]]:
    """A pipeline, and the arguments of its call.

    Args:
        model: a bundled model, a folder or a hub id.
        options: how it is loaded and called.
        policy: gives the number of steps, if the options do not.
        decoded: whether results are decoded, which takes memory.
        processes: those that share the work; each has a device of its own, if there is one.

    Raises:
        ValueError: it cannot be loaded, or called so, or results of this size do not fit.
    """
    given = options.given()
    if policy is not None:
        from ertacache.calibration.session import calibrated_steps

        given = calibrated_steps(policy) | given
    device = options.device or processes.device
    pipe = _load_model(model, options, device=device)
    arguments = _call_arguments(pipe, model, given)
    check_size(pipe, arguments, decoded=decoded)
    return pipe, arguments


def _load_model(model: str, options: CallOptions, *, device: str | None) -> Any:
    """Load a pipeline with its LoRA onto its device; any failure is a ``ValueError``."""
    from ertacache.models.zoo import UnknownModelError, load_pipeline

    _silence_libraries()
    import torch

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as cause:
        raise ValueError(f"cannot run on {place!r}: {str(cause).splitlines()[0]}") from cause
    if options.offload != "none" and torch.device(place).type == "cpu":
        raise ValueError("--offload saves memory of a GPU, and the device is the cpu: leave it out")
    try:
        with Stages() as stage:
            stage("load")
            pipe = load_pipeline(model, dtype=getattr(torch, options.dtype))
            if options.lora is not None:
                load_lora(pipe, options.lora)
            _place(pipe, place, options.offload)
            return pipe
    except (UnknownModelError, LoraError):
        raise
    except Exception as cause:  # a folder or a download can be broken in any way
        raise ValueError(f"cannot load the pipeline {model!r}: {cause}") from cause


def _place(pipe: Any, device: str, offload: str) -> None:
    """Move a pipeline to its device, all of it or part by part as it is used."""
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)


def _silence_libraries() -> None:
    """Keep progress bars and log messages of other libraries out of the output."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        library: Any = logging
        library.set_verbosity_error()
        library.disable_progress_bar()


def _call_arguments(pipe: Any, model: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the pipeline's call: those of the bundled model, then what was given."""
    from ertacache.models.zoo import MODELS

    defaults = MODELS[model].call_arguments if model in MODELS else {}
    arguments = defaults | given
    parameters = inspect.signature(pipe.__call__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    for name in arguments:
        if name not in parameters:
            raise ValueError(f"{type(pipe).__name__} takes no argument {name!r}")
    return arguments


def load_lora(pipe: Any, place: str) -> None:
    """Load a LoRA from a safetensors file, a folder with one, or the hub; never unpickle.

    Raises:
        LoraError: it cannot be loaded into this pipeline.
    """
    path = Path(place)
    named = {"weight_name": path.name} if path.is_file() else {}
    try:
        loaded = path.parent if path.is_file() else place
        pipe.load_lora_weights(str(loaded), use_safetensors=True, **named)
    except Exception as cause:  # a file or a download can be broken in any way
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise LoraError(f"cannot load the LoRA {place!r}: {reason}") from cause
    if not pipe.get_active_adapters():
        raise LoraError(f"the LoRA {place!r} has no weights for the network of this pipeline")


def provenance_of(context: typer.Context, model: str, call: CallOptions) -> dict[str, str]:
    """What a file says of how it was made."""
    made = {"command": command_line(context), "model": model}
    return made if call.lora is None else made | {"lora": call.lora}


@contextmanager
def readable_failures(options: CallOptions) -> Iterator[None]:
    """Report a failure of the pipeline with what was given, and a lack of memory, as bad input."""
    try:
        yield
    except MemoryError as cause:
        raise ValueError("not enough memory") from cause
    except (TypeError, RuntimeError, LookupError, ArithmeticError, AssertionError) as cause:
        if any(words in str(cause).lower() for words in _NO_MEMORY):
            raise ValueError(f"not enough memory: {cause}") from cause
        if not options.given():
            raise
        raise ValueError(f"the pipeline failed with {options}: {cause}") from cause
