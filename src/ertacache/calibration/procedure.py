"""Calibration from end to end: profile, solve, refit in closed loop, validate on held-out prompts.

Brings the parts together; each of them is also there by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from ertacache.calibration.counting import NetworkCalls
from ertacache.calibration.paper import calibrate_paper
from ertacache.calibration.profiling import Progress, number_runs, profile
from ertacache.calibration.quality import choose_point, guess_unit, measured_unit
from ertacache.calibration.refining import REFINE_PROMPTS, Reference, collect_reference, refine
from ertacache.calibration.solving import Method, Wish, make_policy, solve, solve_all
from ertacache.calibration.validation import MIN_PSNR, Way, measure, validate
from ertacache.core.frontier import Frontier, FrontierPoint
from ertacache.core.solver import Trajectory
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.compat import Pipeline

__all__ = ["HELDOUT_SEED", "calibrate"]

HELDOUT_SEED = 1_000_000  # far from the seeds of calibration
TRIAL_PROMPTS = 4
TRIES = 3

Stage = Callable[[str], Progress | None]
"""Called with the name of a stage; returns what is told of its progress."""


def calibrate(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    min_psnr: float | None = None,
    method: Method = "trajectory",
    heldout: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    refit: bool = True,
    refit_prompts: int = REFINE_PROMPTS,
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
        min_psnr: the fewest computed steps that are this near to the full run, in dB, on the
            held-out prompts; up to three numbers are tried. See ``falls_short``.
        method: trajectory rectification, or ``"paper"``.
        heldout: prompts to validate on; by default a quarter of ``prompts`` is held out.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline while profiling and validating, and of the
            network during the refit.
        refit: refit in closed loop; the paper's method: calibrate on the network. Without it both
            are solved from the profile alone.
        refit_prompts: calibration prompts to refit on; their latents are held in memory.
        profile_path: file that the profile is written to as it grows, and resumed from.
        stage: told of every stage; returns what is told of its progress.
        **call: other fields of ``Wish``, and arguments of the pipeline such as
            ``num_inference_steps``.

    Returns:
        The policy, with what was measured, and in ``provenance`` the number of network calls.
    """
    rest = {f.name: call.pop(f.name) for f in fields(Wish) if f.name in call}
    wish = Wish(
        speedup=speedup, compute_steps=compute_steps, min_psnr=min_psnr, method=method, **rest
    )
    if refit_prompts < 1:
        raise ValueError(f"refit_prompts must be at least 1, got {refit_prompts}")
    fitted, judged = _split(prompts, heldout)
    work = _Work(pipe, batch_size, call, stage or (lambda name: None))
    work.runs = number_runs(fitted, seed)[: refit_prompts if refit else 0]
    work.keeping = refit and method == "trajectory"
    known = work.profile(fitted, seed, profile_path)
    asked = number_runs(judged, seed + HELDOUT_SEED)
    if wish.min_psnr is not None:
        policy = work.reach(known, wish.min_psnr, asked)
    else:
        policy = work.validate(work.solve(known, wish), asked)
    provenance = dict(policy.provenance) | {"network calls": str(work.calls)}
    return replace(policy, provenance=provenance)


class _Work:
    """A calibration under way: what every stage needs, and the runs kept for the refit."""

    def __init__(self, pipe: Pipeline, batch_size: int, call: dict[str, Any], tell: Stage) -> None:
        self._pipe, self._batch_size, self._call, self._tell = pipe, batch_size, call, tell
        self._kept: list[tuple[Sequence[ProfiledPrompt], Trajectory]] = []
        self._reference: Reference | None = None
        self.runs: list[ProfiledPrompt] = []  # to refit on
        self.keeping = False  # their latents
        self.calls = NetworkCalls()

    def profile(
        self, prompts: Sequence[str], seed: int, path: str | os.PathLike[str] | None
    ) -> Profile:
        return profile(
            self._pipe,
            prompts,
            seed=seed,
            batch_size=self._batch_size,
            path=path,
            progress=self._tell("profile"),
            observe=self._observe,
            **self._call,
        )

    def _observe(self, runs: Sequence[ProfiledPrompt], run: Trajectory) -> None:
        self.calls.of("profile")(run.num_steps * len(runs))
        if self.keeping and any(one in self.runs for one in runs):
            self._kept.append((runs, Trajectory(run.latents, ())))

    def solve(self, known: Profile, wish: Wish) -> Policy:
        """The policy of a wish, refitted or calibrated on the network if runs are there for it."""
        if self.runs and wish.method == "paper":
            return calibrate_paper(
                self._pipe,
                known,
                self.runs,
                wish=wish,
                call=self._call,
                batch_size=self._batch_size,
                progress=self._tell("refit"),
                count=self.calls.of("refit"),
            )
        self._tell("solve")
        policy = solve(known, **vars(wish))
        return self._refine(policy, known) if self.runs else policy

    def _refine(self, policy: Policy, known: Profile) -> Policy:
        progress, count = self._tell("refit"), self.calls.of("refit")
        size, call = self._batch_size, self._call
        if self._reference is None:
            self._reference = collect_reference(
                self._pipe, self.runs, self._kept, batch_size=size, call=call, count=count
            )
            self._kept = []
        return refine(
            self._pipe,
            policy,
            known,
            reference=self._reference,
            call=call,
            batch_size=size,
            progress=progress,
            count=count,
        )

    def validate(self, policy: Policy, runs: Sequence[ProfiledPrompt]) -> Policy:
        rows = validate(
            self._pipe,
            policy,
            runs,
            batch_size=self._batch_size,
            progress=self._tell("validate"),
            count=self.calls.of("validation"),
            **self._call,
        )
        return replace(policy, validation=rows)

    def reach(self, known: Profile, psnr: float, judged: Sequence[ProfiledPrompt]) -> Policy:
        """The fewest computed steps that reach a PSNR on held-out prompts, in a few tries.

        A trial run on calibration prompts tells what a latent error is in decibels. A try that
        falls short raises the expectation by what it lacked. If none reaches the PSNR, the policy
        that came nearest is returned.
        """
        self._tell("solve")
        frontier = solve_all(known)
        unit = self._measure_unit(known, frontier, psnr)
        point = choose_point(frontier, psnr, unit=unit)
        origin = {MIN_PSNR: f"{psnr:g}", "unit psnr": f"{unit:.3f}"}
        tried: list[Policy] = []
        while point is not None and len(tried) < TRIES:
            policy = _policy_of(known, point, origin)
            tried.append(
                self.validate(self._refine(policy, known) if self.runs else policy, judged)
            )
            measured = tried[-1].validation[0].psnr
            if measured >= psnr:
                return tried[-1]
            unit = min(unit, measured_unit(measured, point.predicted_error))
            point = choose_point(frontier, psnr, unit=unit, above=point.computed)
        return max(tried, key=lambda policy: policy.validation[0].psnr)

    def _measure_unit(self, known: Profile, frontier: Frontier, psnr: float) -> float:
        """The PSNR of a latent error of 1, from calibration prompts run in full and with a plan."""
        point = choose_point(frontier, psnr, unit=guess_unit(known))
        if point is None:
            raise ValueError("a run of fewer than three steps leaves none to reuse")
        policy, steps = _policy_of(known, point, {}), known.num_steps
        ways = [Way("full", steps, None, steps), Way("trial", point.computed, policy, steps)]
        measure(
            self._pipe,
            ways,
            known.prompts[:TRIAL_PROMPTS],
            batch_size=self._batch_size,
            progress=self._tell("trial"),
            call=self._call,
            count=self.calls.of("validation"),
        )
        decibels = ways[1].decibels
        return measured_unit(sum(decibels) / len(decibels), point.predicted_error)


def _policy_of(known: Profile, point: FrontierPoint, origin: dict[str, str]) -> Policy:
    return make_policy(
        known,
        point.plan,
        embed=known,
        predicted_error=point.predicted_error,
        provenance=origin,
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
