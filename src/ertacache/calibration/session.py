"""A pipeline and how it is called: the one bundle that calibration, benchmark and commands share.

Prompts and seeds become arguments of the pipeline here, network evaluations are counted here, and
the latents of full runs are kept here for the refit. Knows neither profiles nor methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from ertacache.core.steppers import Stepper
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt, ProfileError
from ertacache.integration.attach import Handle
from ertacache.integration.microbatch import MicroBatch
from ertacache.integration.private_api import Pipeline
from ertacache.integration.record import Recording, record
from ertacache.integration.stats import RunStats

__all__ = [
    "HELDOUT_SEED",
    "Evaluations",
    "Generated",
    "Progress",
    "Session",
    "Stage",
    "number_runs",
    "split_runs",
    "synchronized_time",
]

HELDOUT_SEED = 1_000_000
"""Added to the seed of calibration for held-out prompts: far from the seeds of calibration."""

Progress = Callable[[int, int], None]
"""Called with the work done and the work in all."""

Stage = Callable[[str], Progress | None]
"""Called with the name of a stage; returns what is called with its progress."""

Phase = Literal["profile", "refit", "validation"]


@dataclass
class Evaluations:
    """Network evaluations by phase, one for each prompt and computed step.

    A batch of eight prompts counts as eight; the branches of guidance, in one call of the network
    or in several, count as one. So the number does not depend on batches.

    Attributes:
        profile: the full runs of the calibration prompts.
        refit: the closed-loop refit, or the paper's calibration runs.
        validation: the held-out prompts in all variants; for a target PSNR also the trial runs.

    Example:
        >>> nfe = Evaluations(profile=60)
        >>> nfe.add("validation", 25)
        >>> str(nfe)
        'profile 60 + refit 0 + validation 25 = 85'
    """

    profile: int = 0
    refit: int = 0
    validation: int = 0

    def add(self, phase: Phase, count: int) -> None:
        """Count the evaluations of a phase."""
        setattr(self, phase, getattr(self, phase) + count)

    @property
    def total(self) -> int:
        """All of them."""
        return self.profile + self.refit + self.validation

    def __str__(self) -> str:
        """The sum in one line."""
        return (
            f"profile {self.profile} + refit {self.refit} + validation {self.validation} "
            f"= {self.total}"
        )


def number_runs(prompts: Sequence[str], seed: int = 0) -> list[ProfiledPrompt]:
    """Give each prompt a seed of its own, counting up from ``seed``.

    Example:
        >>> number_runs(["a cat", "a dog"], seed=7)
        [ProfiledPrompt(prompt='a cat', seed=7), ProfiledPrompt(prompt='a dog', seed=8)]
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts must be a list of at least one string")
    return [ProfiledPrompt(prompt, seed + k) for k, prompt in enumerate(prompts)]


def split_runs(runs: Sequence[ProfiledPrompt], size: int) -> Iterator[list[ProfiledPrompt]]:
    """Batches of at most ``size`` runs, in order."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    for start in range(0, len(runs), size):
        yield list(runs[start : start + size])


@dataclass(frozen=True, eq=False)
class Generated:
    """What one call of the pipeline gave.

    Attributes:
        results: images or videos with values from 0 to 1, shape (P, ...), on the CPU.
        seconds: of the whole call.
        stats: what was computed and reused; None without a policy.
    """

    results: Tensor
    seconds: float
    stats: RunStats | None


class Session:
    """A pipeline, the arguments of its call, and the work done with it.

    Attributes:
        pipe: the pipeline, nothing attached.
        call: arguments of its call, without prompt, generator and output type.
        batch_size: prompts per call of the pipeline; in lockstep, of the network.
        evaluations: of the network, so far.
    """

    def __init__(
        self,
        pipe: Pipeline,
        call: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 1,
        stage: Stage | None = None,
    ) -> None:
        """Keep how the pipeline is called; ``stage`` receives the progress of every stage."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.pipe, self.call, self.batch_size = pipe, dict(call or {}), batch_size
        self.evaluations = Evaluations()
        self._stage = stage
        self._latents: dict[ProfiledPrompt, list[Tensor]] = {}

    def progress(self, stage: str) -> Progress:
        """What to call with the progress of a stage that begins now."""
        found = None if self._stage is None else self._stage(stage)
        return found or (lambda done, total: None)

    def batches(self, runs: Sequence[ProfiledPrompt]) -> list[list[ProfiledPrompt]]:
        """The runs, batch by batch."""
        return list(split_runs(runs, self.batch_size))

    def run(self, runs: Sequence[ProfiledPrompt], **changes: Any) -> Any:
        """Call the pipeline on some runs, with whatever is attached to it."""
        return self.pipe(**self.arguments(runs, **changes))

    def arguments(self, runs: Sequence[ProfiledPrompt], **changes: Any) -> dict[str, Any]:
        """The arguments of a call: prompts, their noise, and the session's own, some changed."""
        call = self.call | changes
        # The noise is drawn on the CPU: the same on every device and in every batch.
        noise = [torch.Generator("cpu").manual_seed(run.seed) for run in runs]
        if len(runs) == 1:  # as plain loops take them
            return call | {"prompt": runs[0].prompt, "generator": noise[0]}
        if isinstance(call.get("negative_prompt"), str):
            # One for all would be broadcast inside of some networks, where caches that compare
            # shapes would give up.
            call["negative_prompt"] = [call["negative_prompt"]] * len(runs)
        return call | {"prompt": [run.prompt for run in runs], "generator": noise}

    def generate(
        self, runs: Sequence[ProfiledPrompt], policy: Policy | None = None, **changes: Any
    ) -> Generated:
        """Generate a batch of images or videos.

        ``policy`` is attached for this call; None runs the pipeline with whatever is attached.
        """
        attached: Any = nullcontext() if policy is None else Handle(self.pipe, policy)
        with attached as handle:
            start = synchronized_time()
            result = self.run(runs, **(changes | {"output_type": "pt"}))
            seconds = synchronized_time() - start
        stats = None if handle is None else handle.stats.last
        computed = len(self.pipe.scheduler.timesteps) if stats is None else stats.computed_steps
        self.evaluations.add("validation", computed * len(runs))
        return Generated(torch.as_tensor(result[0]).float().cpu(), seconds, stats)

    def record(
        self, runs: Sequence[ProfiledPrompt], *, phase: Phase, keep: Collection[ProfiledPrompt] = ()
    ) -> Recording:
        """Record the full runs of one batch; the latents of ``keep`` stay for ``reference``."""
        found = record(self.pipe, **self.arguments(runs))
        if len(found.run.latents[0]) != len(runs):
            raise ProfileError(
                f"{len(runs)} prompts gave latents of a batch of {len(found.run.latents[0])}: "
                "use batch_size=1 and one image per prompt"
            )
        self.evaluations.add(phase, found.run.num_steps * len(runs))
        for place, run in enumerate(runs):
            if run in keep:
                self._latents[run] = [x[place].cpu() for x in found.run.latents]
        return found

    def reference(self, runs: Sequence[ProfiledPrompt]) -> tuple[Tensor, ...]:
        """The latents x_0 ... x_T of full runs, each (P, ...): kept ones, or recorded again."""
        missing = [run for run in runs if run not in self._latents]
        for batch in self.batches(missing):
            self.record(batch, phase="refit", keep=batch)
        steps = zip(*(self._latents[run] for run in runs), strict=True)
        return tuple(torch.stack(step) for step in steps)

    def lockstep(
        self, runs: Sequence[ProfiledPrompt], policy: Policy, stepper: Stepper | None = None
    ) -> Tensor:
        """Run all prompts in one call of the pipeline under a policy; returns the final latents.

        The pipeline holds the latents of all prompts, the network sees ``batch_size`` at a time.

        Args:
            runs: prompts and seeds.
            policy: the policy.
            stepper: takes the place of the policy's own.
        """
        micro_batch = MicroBatch(self.batch_size, prompts=len(runs))
        with Handle(self.pipe, policy, stepper=stepper, micro_batch=micro_batch) as handle:
            latents: Tensor = self.run(runs, output_type="latent")[0]
        self.evaluations.add("refit", handle.stats.last.computed_steps * len(runs))
        return latents


def synchronized_time() -> float:
    """Seconds since some moment in the past, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
