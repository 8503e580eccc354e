"""``ertacache calibrate``: profile, solve, refit and validate in one command.

Exit code 3 says that the policy does not pay, or is not as near to the full run as was wished for;
it is written all the same. Knows no method.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli import options as opt
from ertacache.cli.console import Stages, decibels, say, say_fact, say_validation
from ertacache.cli.group import Interrupted
from ertacache.cli.loading import (
    check_continued,
    check_output,
    choose_prompts,
    open_model,
    read_prompts,
    running,
)
from ertacache.cli.profiling import kept
from ertacache.cli.solving import PolicyOutput, save_policy, say_policy

if TYPE_CHECKING:
    from ertacache.formats.policy import Policy

__all__ = ["DOES_NOT_PAY", "EXAMPLES", "calibrate"]

DOES_NOT_PAY = 3
EXAMPLES = (
    "ertacache calibrate emoji-flux --speedup 2 -o policy.safetensors",
    "ertacache calibrate ./my-pipeline --prompts prompts.txt --heldout heldout.txt --steps 50 "
    "--compute-steps 20 -o policy.safetensors --profile profile.safetensors",
    "ertacache calibrate emoji-flux --min-psnr 45 -o policy.safetensors",
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
    typer.Option("--profile", metavar="FILE", help="Keep the profile, and go on from it."),
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
    model: opt.Model,
    output: PolicyOutput,
    prompts: opt.PromptsFile = None,
    heldout: Heldout = None,
    limit: opt.Limit = None,
    profile: ProfileFile = None,
    speedup: opt.Speedup = None,
    compute_steps: opt.ComputeSteps = None,
    max_error: opt.MaxError = None,
    min_psnr: opt.MinPsnr = None,
    method: opt.Method = "trajectory",
    threshold: opt.Threshold = None,
    reuse: opt.Reuse = "residual",
    adjust_timesteps: opt.AdjustTimesteps = True,
    rectify: opt.Rectify = True,
    refit: Refit = True,
    refit_prompts: RefitPrompts = 32,
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
    """Make a policy for a model and measure it.

    Give exactly one of --speedup, --compute-steps, --max-error, --min-psnr and --threshold.
    Validation on held-out prompts ends it; exit code 3 says that the policy does not pay, or that
    it does not reach --min-psnr.
    """
    given = opt.CallOptions(steps, guidance, height, width, frames, tuple(arg or ()))
    wish = {"speedup": speedup, "compute_steps": compute_steps, "max_error": max_error}
    paper = {"reuse": reuse, "adjust_timesteps": adjust_timesteps, "rectify": rectify}
    wish |= {"min_psnr": min_psnr, "threshold": threshold}
    check_wish(wish, method=method)
    texts = choose_prompts(model, prompts, limit=limit)
    judged = None if heldout is None else read_prompts(heldout)
    check_files(output, profile)
    pipe, call = open_model(model, given, dtype=dtype, device=device)
    check_continued(profile, pipe, call)
    check_budget(wish, call)
    settings: dict[str, Any] = {
        "heldout": judged,
        "seed": seed,
        "batch_size": batch_size,
        "refit": refit,
    }
    settings |= {"refit_prompts": refit_prompts} | wish | paper
    with running(given):
        policy = _calibrate(pipe, texts, profile=profile, method=method, **settings, **call)
    save_policy(policy, output, context=context)
    raise typer.Exit(_say_verdict(policy, output))


def check_wish(wish: dict[str, Any], *, method: str) -> None:
    """Raise before any work unless exactly one wish is there, and the method can grant it."""
    if sum(value is not None for value in wish.values()) != 1:
        names = ["--" + name.replace("_", "-") for name in wish]
        raise ValueError(f"give exactly one of {', '.join(names[:-1])} and {names[-1]}")
    if method == "paper" and any(wish[w] is not None for w in ("max_error", "min_psnr")):
        raise ValueError("the paper's method predicts no error: give --speedup or --threshold")
    if method != "paper" and wish["threshold"] is not None:
        raise ValueError("--threshold is the paper's: give --method paper, or a --speedup")


def check_budget(wish: dict[str, Any], call: dict[str, Any]) -> None:
    """Raise before any work if the number of steps is known and the wish does not fit it."""
    from ertacache.calibration.solving import Wish

    steps = call.get("num_inference_steps")
    if not isinstance(steps, int):
        return
    if wish["threshold"] is not None:
        return
    budget = Wish(**wish).budget(steps)
    if budget is not None and not 1 <= budget <= steps:
        raise ValueError(f"cannot compute {budget} of {steps} steps")


def check_files(output: Path, profile: Path | None) -> None:
    """Raise before any work unless both files can be written, and are two files."""
    from ertacache.formats.policy import Policy
    from ertacache.formats.profile import Profile

    check_output(output, Policy)
    if profile is None:
        return
    check_output(profile, Profile)
    if profile.resolve() == output.resolve():
        raise ValueError("the policy and the profile must be different files")


def _calibrate(pipe: Any, prompts: list[str], *, profile: Path | None, **arguments: Any) -> Policy:
    from ertacache import calibration

    try:
        with Stages() as stage:
            return calibration.calibrate(
                pipe, prompts, profile_path=profile, stage=stage, **arguments
            )
    except KeyboardInterrupt as error:
        raise Interrupted(kept(profile)) from error


def _say_verdict(policy: Policy, path: Path) -> int:
    """Print what was measured and where the policy is; returns the exit code."""
    from ertacache.calibration import falls_short, pays

    say_policy(policy)
    say_validation(policy.validation)
    calls = policy.provenance.get("network calls")
    if calls is not None:
        say_fact("network", f"{calls} calls, each of one prompt on one step")
    paying, shortfall = pays(policy.validation), falls_short(policy)
    for objection in filter(None, (paying, shortfall)):
        say(objection)
    if paying is not None:
        say(f"{path}: the policy, which does not pay")
        return DOES_NOT_PAY
    first = policy.validation[0]
    say(f"it pays: {first.speedup:.2f} times as fast, {decibels(first.psnr)} to the full run")
    say(f"{path}: the policy" + ("" if shortfall is None else ", the nearest that was tried"))
    return 0 if shortfall is None else DOES_NOT_PAY
