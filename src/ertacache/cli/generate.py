"""``ertacache generate``: images and videos with a policy, without one, or both side by side."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ertacache.cli.console import Stages, decibels, print_line
from ertacache.cli.loading import open_model, read_prompts, readable_failures
from ertacache.cli.options import CallOptions, Model, PromptsFile
from ertacache.cli.writing import (
    FPS,
    Destination,
    check_video_writer,
    find_destination,
    side_by_side,
    write,
)

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
    """One result to generate.

    Attributes:
        index: index of the prompt.
        prompt: its text.
        seed: seed of the noise.
    """

    index: int
    prompt: str
    seed: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """One result and how it was made.

    Attributes:
        result: an image or a video with values from 0 to 1.
        seconds: time of the whole call of the pipeline.
        stats: what was computed and reused; None without a policy.
    """

    result: Tensor
    seconds: float
    stats: RunStats | None


def generate(
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR_OR_FILE",
            help="A folder, or for a single result a .png or .mp4 file.",
        ),
    ],
    *,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="What to generate.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="The policy to attach.")
    ] = None,
    prompts: PromptsFile = None,
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
    call: CallOptions,
) -> None:
    """Generate images or videos.

    Images are written as PNG, videos as MP4. With --compare also side by side: the full run, the
    accelerated one, and eight times their difference.
    """
    jobs = _jobs(prompt or [], prompts, seeds)
    attached = _load_policy(policy, compare=compare)
    pipe, arguments = open_model(model, call)
    video = "num_frames" in inspect.signature(pipe.__call__).parameters
    destination = find_destination(output, results=len(jobs), video=video)
    if video:
        check_video_writer()
    if attached is not None and call.steps is None:
        arguments["num_inference_steps"] = attached.num_steps
    with readable_failures(call):
        runner = _Runner(pipe, attached, arguments, destination, fps)
        runner.generate(jobs, compare=compare)


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


@dataclass(frozen=True, eq=False)
class _Runner:
    """A pipeline and how it is called, the policy to attach, and where the results go."""

    pipe: Any
    policy: Policy | None
    arguments: dict[str, Any]
    destination: Destination
    fps: int

    def generate(self, jobs: Sequence[Job], *, compare: bool) -> None:
        """Generate and report all results; with ``compare`` also a summary."""
        if self.policy is not None:
            from ertacache.integration import attach

            attach(self.pipe, self.policy).detach()  # a wrong policy is refused before any run
        pairs: list[tuple[Outcome, Outcome]] = []
        with Stages() as stage:
            progress = stage("generate")
            if compare:
                self._warm_up(jobs[0])
            for done, job in enumerate(jobs):
                full = self._run(job, None) if compare else None
                outcome = self._run(job, self.policy)
                self._keep(job, outcome, full)
                if full is not None:
                    pairs.append((full, outcome))
                progress(done + 1, len(jobs))
        if len(pairs) > 1:
            _print_summary(pairs)

    def _warm_up(self, job: Job) -> None:
        """Keep what happens once per process out of the first timed run."""
        self._call_pipe(job, {"num_inference_steps": WARM_UP_STEPS})

    def _run(self, job: Job, policy: Policy | None) -> Outcome:
        from ertacache.integration import attach

        if policy is None:
            return Outcome(*self._call_pipe(job, {}), None)
        with attach(self.pipe, policy) as handle:
            result, seconds = self._call_pipe(job, {})
            return Outcome(result, seconds, handle.stats.last)

    def _call_pipe(self, job: Job, changes: dict[str, Any]) -> tuple[Tensor, float]:
        import torch

        noise = torch.Generator("cpu").manual_seed(job.seed)
        call = self.arguments | changes | {"output_type": "pt", "generator": noise}
        start = perf_counter()
        output = torch.as_tensor(self.pipe(prompt=job.prompt, **call)[0])
        result = output.float().cpu()  # waits for an accelerator
        seconds = perf_counter() - start
        if result.ndim not in (4, 5) or len(result) != 1:
            raise ValueError(
                f"the pipeline gave a result of shape {tuple(result.shape)}, which is neither one "
                "image nor one video"
            )
        return result[0], seconds

    def _keep(self, job: Job, outcome: Outcome, full: Outcome | None) -> None:
        self._write(job, outcome.result, _account(outcome))
        if full is None:
            return
        self._write(job, full.result, _account(full), kind="full")
        gain = f"{full.seconds / outcome.seconds:.2f}x faster"
        summary = f"PSNR {decibels(_psnr(full, outcome))}, {gain}"
        self._write(job, side_by_side(full.result, outcome.result), summary, kind="compare")

    def _write(self, job: Job, result: Tensor, account: str, *, kind: str = "") -> None:
        path = self.destination.name(job.index, job.seed, job.prompt, kind=kind)
        write(result, path, fps=self.fps)
        print_line(f"{path}: {account}")


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


def _print_summary(pairs: Sequence[tuple[Outcome, Outcome]]) -> None:
    from ertacache.metrics.video import IDENTICAL

    mean = sum(min(_psnr(*pair), IDENTICAL) for pair in pairs) / len(pairs)
    seconds = [sum(pair[side].seconds for pair in pairs) for side in (0, 1)]
    print_line(
        f"all {len(pairs)}: PSNR {decibels(mean)} on average, "
        f"{seconds[0] / seconds[1]:.2f}x faster ({seconds[0]:.2f} s, {seconds[1]:.2f} s)"
    )
