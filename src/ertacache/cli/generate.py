"""``ertacache generate``: images and videos with a policy, without one, or both side by side."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ertacache
from ertacache.cli.console import Stages, decibels, print_line
from ertacache.cli.loading import load_policy, open_model, read_prompts, readable_failures
from ertacache.cli.options import CallOptions, Model, PromptsFile, RunTarget, given_options
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

    from ertacache.calibration.session import Generated, Session
    from ertacache.formats.policy import Policy

__all__ = ["EXAMPLES", "generate"]

EXAMPLES = (
    'ertacache generate emoji-flux "a red apple on a blue background" -o apple.png',
    'ertacache generate emoji-flux "a cat" "a dog" --seeds 0,1,2 --policy policy.safetensors '
    "-o out",
    "ertacache generate emoji-flux --prompts prompts.txt --policy policy.safetensors --compare "
    "-o out",
    'ertacache generate emoji-flux "a cat" --policy policy.safetensors --speedup 3 --steps 24 '
    "--height 96 -o cat.png",
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
    target: RunTarget,
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

    A policy takes any --speedup (or --compute-steps, --min-psnr), number of steps and size; by
    default the speed-up of its first plan. Images are written as PNG, videos as MP4. With --compare
    also side by side: the full run, the accelerated one, and eight times their difference.
    """
    from ertacache.calibration.session import Session

    jobs = _jobs(prompt or [], prompts, seeds)
    attached = _attached(policy, target, compare=compare)
    pipe, arguments = open_model(model, call, policy=attached)
    video = "num_frames" in inspect.signature(pipe.__call__).parameters
    destination = find_destination(output, results=len(jobs), video=video)
    if video:
        check_video_writer()
    session = Session(pipe, arguments)
    if session.varied:
        raise ValueError(f"generate takes one value of {min(session.varied)}, not a list")
    with readable_failures(call):
        _Runner(session, attached, target, destination, fps).generate(jobs, compare=compare)


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


def _attached(path: Path | None, target: RunTarget, *, compare: bool) -> Policy | None:
    """The policy to attach; raise if there is none and an option needs it."""
    if path is not None:
        return load_policy(path, target)
    options = [*given_options(target.given()), *(["--compare"] if compare else [])]
    if options:
        raise ValueError(f"{options[0]} needs a --policy")
    return None


@dataclass(frozen=True, eq=False)
class _Runner:
    """A pipeline and how it is called, the policy and its target, and where the results go."""

    session: Session
    policy: Policy | None
    target: RunTarget
    destination: Destination
    fps: int

    def generate(self, jobs: Sequence[Job], *, compare: bool) -> None:
        """Generate and report all results; with ``compare`` also a summary."""
        if self.policy is not None:
            # A wrong policy is refused before any run.
            ertacache.attach(self.session.pipe, self.policy, **self.target.given()).detach()
        pairs: list[tuple[Generated, Generated]] = []
        with Stages() as stage:
            progress = stage("generate")
            if compare:  # keeps what happens once per process out of the first timed run
                self._run(jobs[0], None, num_inference_steps=WARM_UP_STEPS)
            for done, job in enumerate(jobs):
                full = self._run(job, None) if compare else None
                outcome = self._run(job, self.policy)
                self._keep(job, outcome, full)
                if full is not None:
                    pairs.append((full, outcome))
                progress(done + 1, len(jobs))
        if len(pairs) > 1:
            _print_summary(pairs)

    def _run(self, job: Job, policy: Policy | None, **changes: Any) -> Generated:
        from ertacache.core.plans import Target
        from ertacache.formats.profile import ProfiledPrompt

        runs, target = [ProfiledPrompt(job.prompt, job.seed)], Target(**self.target.given())
        made = self.session.generate(runs, policy, target=target, **changes)
        if made.results.ndim not in (4, 5) or len(made.results) != 1:
            raise ValueError(
                f"the pipeline gave a result of shape {tuple(made.results.shape)}, which is "
                "neither one image nor one video"
            )
        return made

    def _keep(self, job: Job, outcome: Generated, full: Generated | None) -> None:
        self._write(job, outcome.results[0], _account(outcome))
        if full is None:
            return
        self._write(job, full.results[0], _account(full), kind="full")
        gain = f"{full.seconds / outcome.seconds:.2f}x faster"
        summary = f"PSNR {decibels(_psnr(full, outcome))}, {gain}"
        self._write(job, side_by_side(full.results[0], outcome.results[0]), summary, kind="compare")

    def _write(self, job: Job, result: Tensor, account: str, *, kind: str = "") -> None:
        path = self.destination.name(job.index, job.seed, job.prompt, kind=kind)
        write(result, path, fps=self.fps)
        print_line(f"{path}: {account}")


def _account(outcome: Generated) -> str:
    stats = outcome.stats
    if stats is None:
        return f"full run, {outcome.seconds:.2f} s"
    return (
        f"{stats.computed_steps} steps computed, {stats.reused_steps} reused, "
        f"{outcome.seconds:.2f} s, {stats.denoiser_seconds:.2f} s of them in the network"
    )


def _psnr(full: Generated, outcome: Generated) -> float:
    from ertacache.metrics import psnr

    return float(psnr(outcome.results, full.results)[0])


def _print_summary(pairs: Sequence[tuple[Generated, Generated]]) -> None:
    from ertacache.metrics import IDENTICAL

    mean = sum(min(_psnr(*pair), IDENTICAL) for pair in pairs) / len(pairs)
    seconds = [sum(pair[side].seconds for pair in pairs) for side in (0, 1)]
    print_line(
        f"all {len(pairs)}: PSNR {decibels(mean)} on average, "
        f"{seconds[0] / seconds[1]:.2f}x faster ({seconds[0]:.2f} s, {seconds[1]:.2f} s)"
    )
