"""Calibration from end to end: profile, solve, refit in closed loop, validate on held-out prompts.

Brings the parts together; each of them is also there by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from ertacache.calibration.profiling import Progress, number_runs, profile
from ertacache.calibration.refining import REFINE_PROMPTS, collect_reference, refine
from ertacache.calibration.solving import Method, Wish, solve
from ertacache.calibration.validation import validate
from ertacache.core.solver import Trajectory
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.compat import Pipeline

__all__ = ["HELDOUT_SEED", "calibrate"]

HELDOUT_SEED = 1_000_000  # far from the seeds of calibration

Stage = Callable[[str], Progress | None]
"""Called with the name of a stage; returns what is told of its progress."""


def calibrate(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    method: Method = "trajectory",
    heldout: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    refit: bool = True,
    profile_path: str | os.PathLike[str] | None = None,
    stage: Stage | None = None,
    **call: Any,
) -> Policy:
    """Make a policy for a pipeline: profile it, solve, refit, and measure on held-out prompts.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        prompts: the calibration prompts; a handful will do, 8 to 32 are better.
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps, in place of a speed-up.
        method: trajectory rectification, or ``"paper"``.
        heldout: prompts to validate on; by default a quarter of ``prompts`` is held out.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline while profiling and validating.
        refit: refit in closed loop, up to 16 prompts in one call; trajectory rectification only.
        profile_path: file that the profile is written to as it grows, and resumed from.
        stage: told of every stage; returns what is told of its progress.
        **call: other fields of ``Wish``, and arguments of the pipeline such as
            ``num_inference_steps``.

    Returns:
        The policy; ``policy.validation`` holds what was measured.
    """
    rest = {f.name: call.pop(f.name) for f in fields(Wish) if f.name in call}
    wish = Wish(speedup=speedup, compute_steps=compute_steps, method=method, **rest)
    tell: Stage = stage or (lambda name: None)
    fitted, judged = _split(prompts, heldout)
    work = _Work(pipe, batch_size, call, keep=refit and method == "trajectory")
    known = work.profile(fitted, seed, path=profile_path, progress=tell("profile"))
    tell("solve")
    policy = solve(known, **vars(wish))
    if work.keep:
        policy = work.refine(policy, known, fitted, seed, progress=tell("refit"))
    runs = number_runs(judged, seed + HELDOUT_SEED)
    rows = validate(pipe, policy, runs, batch_size=batch_size, progress=tell("validate"), **call)
    return replace(policy, validation=rows)


class _Work:
    """A calibration under way: what every stage needs, and the runs kept for the refit."""

    def __init__(
        self, pipe: Pipeline, batch_size: int, call: dict[str, Any], *, keep: bool
    ) -> None:
        self._pipe, self._batch_size, self._call, self.keep = pipe, batch_size, call, keep
        self._kept: list[tuple[Sequence[ProfiledPrompt], Trajectory]] = []

    def profile(self, prompts: Sequence[str], seed: int, **options: Any) -> Profile:
        return profile(
            self._pipe,
            prompts,
            seed=seed,
            batch_size=self._batch_size,
            observe=self._observe,
            **options,
            **self._call,
        )

    def _observe(self, runs: Sequence[ProfiledPrompt], run: Trajectory) -> None:
        if self.keep and sum(len(batch) for batch, _ in self._kept) < REFINE_PROMPTS:
            self._kept.append((runs, run))

    def refine(
        self,
        policy: Policy,
        known: Profile,
        prompts: Sequence[str],
        seed: int,
        *,
        progress: Progress | None,
    ) -> Policy:
        runs = number_runs(prompts, seed)[:REFINE_PROMPTS]
        reference = collect_reference(
            self._pipe, runs, self._kept, batch_size=self._batch_size, call=self._call
        )
        return refine(
            self._pipe, policy, known, reference=reference, progress=progress, call=self._call
        )


def _split(prompts: Sequence[str], heldout: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Calibration and held-out prompts; a quarter is held out unless others are given."""
    if heldout is not None:
        return list(prompts), list(heldout)
    number_runs(prompts)
    if len(prompts) < 2:
        return list(prompts), list(prompts)  # another seed is all there is to hold out
    count = max(1, len(prompts) // 4)
    return list(prompts[:-count]), list(prompts[-count:])
