"""``ertacache check``: what a policy lost on a pipeline that has changed since it was calibrated.

Exit code 3 means that a plan lost more than 6 dB.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli.console import Stages, print_line, print_table
from ertacache.cli.loading import load_policy, open_model, read_prompts, readable_failures
from ertacache.cli.options import (
    BatchSize,
    CallOptions,
    Model,
    PromptsFile,
    Seed,
    Speedups,
    TargetOptions,
)
from ertacache.cli.output import JsonFile
from ertacache.cli.policies import NOT_RECOMMENDED
from ertacache.cli.writing import check_json, write_json
from ertacache.formats.text import decibels

if TYPE_CHECKING:
    from ertacache.formats.checked import Check

__all__ = ["EXAMPLES", "check", "quantize"]

EXAMPLES = (
    "ertacache check emoji-flux policy.safetensors",
    "ertacache check emoji-flux policy.safetensors --lora lora/style.safetensors --speedup 3",
    "ertacache check emoji-flux hub:user/repo --dtype bfloat16 --arg true_cfg_scale=7",
    "ertacache check ./my-pipeline policy.safetensors --prompts prompts.txt --limit 16 --int8 "
    "--json check.json",
)


Int8 = Annotated[
    bool, typer.Option("--int8", help="Quantise the weights of the network to int8 (torchao).")
]


def check(
    model: Model,
    policy: Annotated[
        Path, typer.Argument(metavar="POLICY", help="A policy file, or hub:user/repo.")
    ],
    *,
    speedup: Speedups = None,
    int8: Int8 = False,
    prompts: PromptsFile = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Use only the first N prompts.")
    ] = 8,
    seed: Seed = 0,
    batch_size: BatchSize = 1,
    json: JsonFile = None,
    call: CallOptions,
) -> None:
    """Check whether a policy holds for a changed model.

    That is one with a LoRA, int8 weights, or other settings. A few prompts are run in full and
    accelerated, both on the changed model, at every --speedup, by default those of the plans in the
    policy. The PSNR is compared with the one in the policy. Exit code 3 means that it lost more
    than 6 dB.
    """
    texts = _choose_prompts(model, prompts)[:limit]
    if int8 and find_spec("torchao") is None:
        raise ValueError('--int8 needs torchao: pip install "ertacache[quantize]"')
    check_json(json)
    known = load_policy(policy, {"speedup": TargetOptions(speedup=speedup).speedup})
    pipe, arguments = open_model(model, call, policy=known)
    if int8:
        quantize(pipe)
    from ertacache.calibration.check import check as measure

    options: dict[str, Any] = {"speedup": speedup, "seed": seed, "batch_size": batch_size}
    with readable_failures(call), Stages() as stage:
        found = measure(known, pipe, texts, stage=stage, **options, **arguments)
    _print(found)
    write_json(json, [plan.to_json() for plan in found.plans])
    raise typer.Exit(NOT_RECOMMENDED if found.failed else 0)


def _choose_prompts(model: str, path: Path | None) -> list[str]:
    """The prompts of the file, or the held-out ones of a bundled model."""
    from ertacache.models.zoo import MODELS, load_prompts

    if path is not None:
        return read_prompts(path)
    if model in MODELS:
        return load_prompts(model, "heldout")
    raise ValueError(f"{model!r} comes with no prompts: give a file with --prompts")


def quantize(pipe: Any) -> None:
    """Store the weights of a pipeline's networks as int8; activations keep their type."""
    from ertacache.integration.identity import find_denoisers

    torchao: Any = import_module("torchao.quantization")  # an extra that is not always there
    for network in find_denoisers(pipe).values():
        torchao.quantize_(network, torchao.Int8WeightOnlyConfig())


def _print(found: Check) -> None:
    rows = []
    for plan in found.plans:
        now = plan.measured
        known = "" if plan.expected is None else f"{decibels(plan.expected)}, {plan.source}"
        lost = "" if plan.lost is None else f"{plan.lost:+.1f} dB"
        share = f"{now.computed_steps} of {plan.num_steps}"
        rows.append([share, f"{now.speedup:.2f}x", decibels(now.psnr), known, lost])
    title = f"Measured on {found.plans[0].measured.measured_on}, to the full run of this pipeline"
    print_table(title, ["computed steps", "speed-up", "PSNR", "in the policy", "lost"], rows)
    for line in str(found).splitlines():
        print_line(line)
