"""``ertacache generate``: images and videos with a policy, without one, or both side by side."""

from __future__ import annotations

import inspect
import json as formatter
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ertacache
from ertacache.cli.console import Stages, print_line
from ertacache.cli.group import processes_of
from ertacache.cli.loading import load_policy, open_model, read_prompts, readable_failures
from ertacache.cli.options import CallOptions, Model, PromptsFile, RunTarget, given_options
from ertacache.cli.output import JsonFile
from ertacache.cli.writing import (
    FPS,
    Destination,
    check_json,
    find_destination,
    finite,
    side_by_side,
    write,
    write_json,
)
from ertacache.formats.text import decibels
from ertacache.integration.sizes import differing_size

if TYPE_CHECKING:
    from torch import Tensor

    from ertacache.calibration.session import Generated, Session
    from ertacache.formats.policy import Policy

__all__ = ["EXAMPLES", "generate"]

EXAMPLES = (
    'ertacache generate emoji-flux "a large cat on a blue background" -o cat.png',
    'ertacache generate emoji-flux "a cat" "a dog" --seeds 0,1,2 --policy policy.safetensors '
    "-o out",
    "ertacache generate emoji-flux --prompts prompts.txt --policy policy.safetensors --compare "
    "-o out",
    'ertacache generate emoji-flux "a cat" --policy policy.safetensors --speedup 3 --steps 24 '
    "--height 96 -o cat.png",
)
COMPRESSED = (
    "this is the PSNR of the results; the MP4 files are compressed, and ertacache metrics shows "
    "less on them: give --lossless to keep it"
)
WARM_UP_STEPS = 2
_Made = tuple[list[str], list[float], dict[str, Any]]
"""Lines to print, with ``--compare`` what was measured, and the values for machines."""
_logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class VideoOptions:
    """How videos are written.

    Attributes:
        fps: frames per second.
        lossless: keep every value of the 8-bit frames.
    """

    fps: Annotated[
        int,
        typer.Option("--fps", min=1, max=1000, metavar="N", help="Frames per second of a video."),
    ] = FPS
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Write videos without loss, as larger MP4 files.")
    ] = False


@dataclass(frozen=True)
class _Compared:
    """What is kept of a comparison: PSNR in dB, and the seconds of both runs."""

    psnr: float
    full: float
    accelerated: float

    @property
    def gain(self) -> str:
        return f"{self.full / self.accelerated:.2f}x faster"


def generate(
    context: typer.Context,
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
        Path | None,
        typer.Option("--policy", metavar="FILE", help="The policy to attach, or hub:user/repo."),
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
    video: VideoOptions,
    json: JsonFile = None,
    call: CallOptions,
) -> None:
    """Generate images or videos.

    A policy takes any --speedup (or --compute-steps, --min-psnr), number of steps and size; by
    default the speed-up of its first plan. Images are written as PNG, videos as MP4. With --compare
    also side by side: the full run, the accelerated one, and eight times their difference. The PSNR
    that it prints is that of the results themselves; MP4 files show less of it, unless they are
    --lossless.
    """
    jobs = _jobs(prompt or [], prompts, seeds)
    check_json(json)
    attached = _attached(policy, target, compare=compare)
    processes = processes_of(context)
    pipe, arguments = open_model(model, call, policy=attached, processes=processes)
    from ertacache.calibration.session import Session
    from ertacache.metrics.encoding import check_video_writer

    is_video = "num_frames" in inspect.signature(pipe.__call__).parameters
    destination = find_destination(output, results=len(jobs), video=is_video)
    if is_video:
        check_video_writer()

    session = Session(pipe, arguments, processes=processes)
    if session.varied:
        raise ValueError(f"generate takes one value of {min(session.varied)}, not a list")
    with readable_failures(call):
        runner = _Runner(session, attached, target, destination, video)
        write_json(json, runner.generate(jobs, compare=compare))


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
        return load_policy(path, target.given())
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
    video: VideoOptions

    def generate(self, jobs: Sequence[Job], *, compare: bool) -> list[dict[str, Any]]:
        """Generate and report all results, with ``compare`` also a summary; returns the values."""
        if self.policy is not None:
            # A wrong policy is refused before any run.
            ertacache.attach(self.session.pipe, self.policy, **self.target.given()).detach()
        compared: list[_Compared] = []
        values: list[dict[str, Any]] = []
        with Stages() as stage:
            progress = stage("generate")
            if compare:  # keeps what happens once per process out of the first timed run
                self._run(jobs[0], None, num_inference_steps=WARM_UP_STEPS)
            processes = self.session.sharing.processes
            for first in range(0, len(jobs), processes.count):  # each generates one of them
                mine = [
                    self._generate(job, compare) for job in jobs[first:][processes.number :][:1]
                ]
                made = processes.exchange("generated", formatter.dumps(mine).encode())
                for lines, numbers, value in _unpack(made):
                    for line in lines:
                        print_line(line)
                    compared += [_Compared(*numbers)] if numbers else []
                    values.append(value)
                progress(min(first + processes.count, len(jobs)), len(jobs))
        if len(compared) > 1:
            _print_summary(compared)
        if compared and self.destination.suffix == ".mp4" and not self.video.lossless:
            print_line(COMPRESSED)
        return values

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
        differs = differing_size(made.results.shape[1:], self.session.call)
        if differs is not None:
            _logger.warning(differs)  # printed once
        return made

    def _generate(self, job: Job, compare: bool) -> _Made:
        """Write one result."""
        full = self._run(job, None) if compare else None
        outcome = self._run(job, self.policy)
        lines = [self._write(job, outcome.results[0], _account(outcome))]
        value = self._value(job, outcome)
        if full is None:
            return lines, [], value
        from ertacache.metrics import psnr

        lines.append(self._write(job, full.results[0], _account(full), kind="full"))
        close = float(psnr(outcome.results, full.results)[0])
        made = _Compared(close, full.seconds, outcome.seconds)
        row = side_by_side(full.results[0], outcome.results[0])
        account = f"PSNR {decibels(close)}, {made.gain}"
        lines.append(self._write(job, row, account, kind="compare"))
        value |= {"psnr": finite(close), "full_seconds": full.seconds}
        return lines, [made.psnr, made.full, made.accelerated], value

    def _value(self, job: Job, outcome: Generated) -> dict[str, Any]:
        """One result for machines."""
        path, stats = self.destination.name(job.index, job.seed, job.prompt), outcome.stats
        steps: dict[str, Any] = {}
        if stats is not None:
            steps = {"computed_steps": stats.computed_steps, "reused_steps": stats.reused_steps}
        made = {"file": str(path), "prompt": job.prompt, "seed": job.seed}
        return made | {"seconds": outcome.seconds} | steps

    def _write(self, job: Job, result: Tensor, account: str, *, kind: str = "") -> str:
        path = self.destination.name(job.index, job.seed, job.prompt, kind=kind)
        write(result, path, fps=self.video.fps, lossless=self.video.lossless)
        return f"{path}: {account}"


def _unpack(made: Sequence[bytes]) -> Iterator[_Made]:
    """What every process made, in the order of the processes."""
    for data in made:
        yield from formatter.loads(data)


def _account(outcome: Generated) -> str:
    stats = outcome.stats
    if stats is None:
        return f"full run, {outcome.seconds:.2f} s"
    return (
        f"{stats.computed_steps} steps computed, {stats.reused_steps} reused, "
        f"{outcome.seconds:.2f} s, {stats.denoiser_seconds:.2f} s of them in the network"
    )


def _print_summary(compared: Sequence[_Compared]) -> None:
    from ertacache.metrics import IDENTICAL

    mean = sum(min(one.psnr, IDENTICAL) for one in compared) / len(compared)
    full, fast = (sum(getattr(one, name) for one in compared) for name in ("full", "accelerated"))
    print_line(
        f"all {len(compared)}: PSNR {decibels(mean)} on average, "
        f"{_Compared(mean, full, fast).gain} ({full:.2f} s, {fast:.2f} s)"
    )
