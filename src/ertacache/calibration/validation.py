"""Validation: the policy against the full run, plain reuse and fewer steps, on held-out prompts.

Ways of sampling take turns on every batch, so that a slow moment of the machine hits all of them;
times are medians. Knows no solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.counting import Count
from ertacache.calibration.profiling import Progress, generators, split_runs
from ertacache.core.plan import PaperPlan
from ertacache.core.threshold import uniform_schedule
from ertacache.formats.policy import Policy, ValidationRow
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration import attach
from ertacache.integration.compat import Pipeline
from ertacache.metrics import psnr

__all__ = [
    "MIN_PSNR",
    "Way",
    "falls_short",
    "generate",
    "measure",
    "now",
    "pays",
    "plain_reuse",
    "validate",
    "ways_of",
]

MIN_PSNR = "min psnr"
"""Key of the wished PSNR in a policy's provenance."""

WORTHWHILE = 3.0  # dB ahead of what needs no calibration: half of the squared error
ANOTHER_PICTURE = 20.0  # dB below which a result is no longer the picture of the full run
IDENTICAL = 100.0  # dB that an identical picture counts for in a mean


@dataclass
class Way:
    """One way of sampling, and what it was seen to do.

    Attributes:
        name: what a reader calls it.
        computed_steps: steps on which the network runs.
        policy: what is attached; None for an untouched pipeline.
        num_inference_steps: steps of the run.
        seconds: time of every batch.
        decibels: PSNR of every prompt to the full run.
    """

    name: str
    computed_steps: int
    policy: Policy | None
    num_inference_steps: int
    seconds: list[float] = field(default_factory=list)
    decibels: list[float] = field(default_factory=list)


def plain_reuse(policy: Policy) -> Policy:
    """The same number of computed steps, spread evenly, the last output reused as it is."""
    steps = uniform_schedule(policy.num_steps, max(2, len(policy.compute_steps)))
    plan = PaperPlan(steps, "velocity", policy.sigmas)
    return Policy(plan, policy.sigmas, fingerprint=policy.fingerprint)


def ways_of(policies: dict[str, Policy]) -> list[Way]:
    """The full run, each policy, and for each number of computed steps the two alternatives."""
    first = next(iter(policies.values()))
    ways = [Way("full", first.num_steps, None, first.num_steps)]
    for name, policy in policies.items():
        ways.append(Way(name, len(policy.compute_steps), policy, policy.num_steps))
    for policy in {len(p.compute_steps): p for p in policies.values()}.values():
        computed = len(policy.compute_steps)
        plain = plain_reuse(policy)
        ways.append(Way("plain reuse", len(plain.compute_steps), plain, policy.num_steps))
        ways.append(Way("fewer steps", computed, None, computed))
    return ways


def generate(
    pipe: Pipeline,
    runs: Sequence[ProfiledPrompt],
    way: Way,
    call: dict[str, Any],
    *,
    count: Count | None = None,
) -> tuple[Tensor, float]:
    """Run a batch one way: pictures or videos with values from 0 to 1, and the seconds it took.

    ``count`` is told how often the network was asked.
    """
    attached: Any = nullcontext() if way.policy is None else attach(pipe, way.policy)
    arguments = call | {"output_type": "pt", "num_inference_steps": way.num_inference_steps}
    with attached as handle:
        start = now()
        result = pipe(prompt=[run.prompt for run in runs], generator=generators(runs), **arguments)
        seconds = now() - start
    if count is not None:
        asked = (
            len(pipe.scheduler.timesteps) if handle is None else handle.stats.last.computed_steps
        )
        count(asked * len(runs))
    return torch.as_tensor(result[0]).float().cpu(), seconds


def validate(
    pipe: Pipeline,
    policy: Policy,
    runs: Sequence[ProfiledPrompt],
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
    count: Count | None = None,
    **call: Any,
) -> tuple[ValidationRow, ...]:
    """Measure a policy, plain reuse and fewer steps against the full run on held-out prompts.

    Args:
        pipe: the pipeline, nothing attached.
        policy: the policy.
        runs: held-out prompts and their seeds.
        batch_size: prompts per call.
        progress: called with the calls done and the calls in all.
        count: told how often the network was asked.
        **call: arguments of the pipeline.
    """
    ways = ways_of({"policy": policy})
    measure(pipe, ways, runs, batch_size=batch_size, progress=progress, call=call, count=count)
    full = median(ways[0].seconds)
    return tuple(
        ValidationRow(
            method=way.name,
            computed_steps=way.computed_steps,
            psnr=sum(way.decibels) / len(way.decibels),
            speedup=full / median(way.seconds),
            prompts=len(runs),
        )
        for way in ways[1:]
    )


def measure(
    pipe: Pipeline,
    ways: Sequence[Way],
    runs: Sequence[ProfiledPrompt],
    *,
    batch_size: int,
    progress: Progress | None,
    call: dict[str, Any],
    observe: Callable[[Way, Sequence[ProfiledPrompt], Tensor], None] | None = None,
    count: Count | None = None,
) -> None:
    """Run all ways on all batches in turn and write down what they did; the first is the truth."""
    batches = list(split_runs(runs, batch_size))
    done = 0
    for batch in batches:
        truth: Tensor | None = None
        for way in ways:
            result, seconds = generate(pipe, batch, way, call, count=count)
            truth = result if truth is None else truth
            way.seconds.append(seconds)
            way.decibels += psnr(result, truth).clamp_max(IDENTICAL).tolist()
            if observe is not None:
                observe(way, batch, result)
            done += 1
            if progress is not None:
                progress(done, len(batches) * len(ways))


def pays(rows: Sequence[ValidationRow]) -> str | None:
    """None if the first row is worth having, otherwise the sentence that says why not."""
    policy, *others = rows
    if policy.speedup < 1.1:
        return f"not worth it: the policy is {policy.speedup:.2f} times as fast as the full run"
    best = max(others, key=lambda row: row.psnr, default=None)
    if best is not None and policy.psnr < best.psnr + WORTHWHILE and not math.isinf(policy.psnr):
        nearly = "closer" if policy.psnr < best.psnr else "nearly as close"
        return (
            f"not worth it: {best.method}, which needs no calibration, is {nearly} to the full "
            f"run, {best.psnr:.1f} dB against {policy.psnr:.1f}"
        )
    if policy.psnr < ANOTHER_PICTURE:
        return (
            f"not worth it: {policy.computed_steps} computed steps give another picture, "
            f"{policy.psnr:.1f} dB to the full run at {policy.speedup:.2f} times its speed: "
            "compute more of them; of the few steps of a distilled model every one is needed"
        )
    return None


def falls_short(policy: Policy) -> str | None:
    """None if a policy has the PSNR that was wished for, or none was; otherwise the sentence."""
    wished = policy.provenance.get(MIN_PSNR)
    if wished is None or not policy.validation:
        return None
    measured = policy.validation[0].psnr
    if measured >= float(wished):
        return None
    return f"not reached: {float(wished):.1f} dB were wished for, {measured:.1f} dB measured"


def now() -> float:
    """Seconds since some moment in the past, after the device has done what it was asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
