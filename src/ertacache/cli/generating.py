"""``ertacache generate``: pictures and videos with a policy, without one, or both side by side.

Knows how a pipeline is run and timed, not how a policy works.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli import options as opt
from ertacache.cli.console import Stages, decibels, say
from ertacache.cli.loading import open_model, read_prompts, running
from ertacache.cli.writing import FPS, Target, beside, check_video_writer, find_target, write

if TYPE_CHECKING:
    from torch import Tensor

    from ertacache.formats.policy import Policy
    from ertacache.integration import RunStats

__all__ = ["EXAMPLES", "generate"]

EXAMPLES = (
    'ertacache generate emoji-flux "a red apple on a blue background" -o apple.png',
    'ertacache generate emoji-flux "a cat" "a dog" --seeds 0,1,2 --policy policy.safetensors '
    "-o out",
    "ertacache generate emoji-flux --prompts prompts.txt --policy policy.safetensors --compare "
    "-o out",
)
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Job:
    """One result to make.

    Attributes:
        index: place of the prompt.
        prompt: its text.
        seed: seed of the noise.
    """

    index: int
    prompt: str
    seed: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """One result as it came out.

    Attributes:
        result: a picture or a video with values from 0 to 1.
        seconds: time of the whole call.
        stats: what was computed and reused; None without a policy.
    """

    result: Tensor
    seconds: float
    stats: RunStats | None


def generate(
    model: opt.Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR_OR_FILE",
            help="A folder, or for a single result a .png or .mp4 file.",
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="What to generate.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="The policy to attach.")
    ] = None,
    prompts: opt.PromptsFile = None,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N,N,...", help="Seeds, each for every prompt.")
    ] = "0",
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run with and without the policy, and show both."),
    ] = False,
    fps: Annotated[
        int, typer.Option("--fps", min=1, metavar="N", help="Frames per second of a video.")
    ] = FPS,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    height: opt.Height = None,
    width: opt.Width = None,
    frames: opt.Frames = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = None,
    arg: opt.Arguments = None,
) -> None:
    """Generate pictures or videos.

    Pictures are written as PNG, videos as MP4. With --compare also side by side: the full run, the
    accelerated one, and eight times their difference.
    """
    given = opt.CallOptions(steps, guidance, height, width, frames, tuple(arg or ()))
    jobs = _jobs(prompt or [], prompts, seeds)
    followed = _load_policy(policy, compare=compare)
    pipe, call = open_model(model, given, dtype=dtype, device=device)
    video = "num_frames" in inspect.signature(pipe.__call__).parameters
    target = find_target(output, results=len(jobs), video=video)
    if video:
        check_video_writer()
    if followed is not None and steps is None:
        call["num_inference_steps"] = followed.num_steps
    with running(given):
        _Studio(pipe, followed, target=target, call=call, fps=fps).make(jobs, compare=compare)


def _jobs(prompts: Sequence[str], path: Path | None, seeds: str) -> list[Job]:
    """Every prompt with every seed."""
    if bool(prompts) == (path is not None):
        raise ValueError("give prompts, or a file of them with --prompts")
    texts = list(prompts) if path is None else read_prompts(path)
    if not all(text.strip() for text in texts):
        raise ValueError("a prompt is empty")
    numbers = _parse_seeds(seeds)
    return [Job(index, text, seed) for index, text in enumerate(texts) for seed in numbers]


def _parse_seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < 1 << 63 for part in parts):
        raise ValueError(f"--seeds takes numbers such as 0,1,2, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def _load_policy(path: Path | None, *, compare: bool) -> Policy | None:
    from ertacache.formats.policy import Policy

    if path is not None:
        return Policy.load(path)
    if compare:
        raise ValueError("--compare needs a --policy to compare with the full run")
    return None


class _Studio:
    """A pipeline, what is attached to it, and where its results go."""

    def __init__(
        self,
        pipe: Any,
        policy: Policy | None,
        *,
        target: Target,
        call: dict[str, Any],
        fps: int,
    ) -> None:
        self._pipe, self._policy = pipe, policy
        self._target, self._call, self._fps = target, call, fps

    def make(self, jobs: Sequence[Job], *, compare: bool) -> None:
        """Make all results, tell of each, and with ``compare`` of all together."""
        if self._policy is not None:
            from ertacache.integration import attach

            attach(self._pipe, self._policy).detach()  # refused before anything has run
        pairs: list[tuple[Outcome, Outcome]] = []
        with Stages() as stage:
            tell = stage("generate")
            if compare:
                self._warm_up(jobs[0])
            for done, job in enumerate(jobs):
                full = self._run(job, None) if compare else None
                outcome = self._run(job, self._policy)
                self._keep(job, outcome, full)
                if full is not None:
                    pairs.append((full, outcome))
                tell(done + 1, len(jobs))
        if len(pairs) > 1:
            _say_summary(pairs)

    def _warm_up(self, job: Job) -> None:
        """Let the first timed run not pay for what happens once per process."""
        self._call_pipe(job, {"num_inference_steps": WARM_UP_STEPS})

    def _run(self, job: Job, policy: Policy | None) -> Outcome:
        from ertacache.integration import attach

        if policy is None:
            return Outcome(*self._call_pipe(job, {}), None)
        with attach(self._pipe, policy) as handle:
            result, seconds = self._call_pipe(job, {})
            return Outcome(result, seconds, handle.stats.last)

    def _call_pipe(self, job: Job, changes: dict[str, Any]) -> tuple[Tensor, float]:
        import torch

        noise = torch.Generator("cpu").manual_seed(job.seed)
        call = self._call | changes | {"output_type": "pt", "generator": noise}
        start = perf_counter()
        output = torch.as_tensor(self._pipe(prompt=job.prompt, **call)[0])
        result = output.float().cpu()  # waits for an accelerator
        seconds = perf_counter() - start
        if result.ndim not in (4, 5) or len(result) != 1:
            raise ValueError(
                f"the pipeline gave a result of shape {tuple(result.shape)}, which is neither one "
                "picture nor one video"
            )
        return result[0], seconds

    def _keep(self, job: Job, outcome: Outcome, full: Outcome | None) -> None:
        path = self._target.name(job.index, job.seed, job.prompt)
        write(outcome.result, path, fps=self._fps)
        say(f"{path}: {_account(outcome)}")
        if full is None:
            return
        path = self._target.name(job.index, job.seed, job.prompt, kind="full")
        write(full.result, path, fps=self._fps)
        say(f"{path}: {_account(full)}")
        path = self._target.name(job.index, job.seed, job.prompt, kind="compare")
        write(beside(full.result, outcome.result), path, fps=self._fps)
        say(
            f"{path}: PSNR {decibels(_psnr(full, outcome))}, "
            f"{full.seconds / outcome.seconds:.2f} times as fast"
        )


def _account(outcome: Outcome) -> str:
    stats = outcome.stats
    if stats is None:
        return f"full run, {outcome.seconds:.2f} s"
    return (
        f"{stats.computed_steps} steps computed, {stats.reused_steps} reused, "
        f"{outcome.seconds:.2f} s, {stats.denoiser_seconds:.2f} s of them in the network"
    )


def _psnr(full: Outcome, outcome: Outcome) -> float:
    from ertacache.metrics import psnr

    return float(psnr(outcome.result[None], full.result[None])[0])


def _say_summary(pairs: Sequence[tuple[Outcome, Outcome]]) -> None:
    from ertacache.calibration.validation import IDENTICAL

    mean = sum(min(_psnr(*pair), IDENTICAL) for pair in pairs) / len(pairs)
    seconds = [sum(pair[side].seconds for pair in pairs) for side in (0, 1)]
    say(
        f"all {len(pairs)}: PSNR {decibels(mean)} on average, "
        f"{seconds[0] / seconds[1]:.2f} times as fast ({seconds[0]:.2f} s, {seconds[1]:.2f} s)"
    )
