"""Refining: the closed-loop refit of a solved policy, kept only where it helps unseen prompts.

Runs the pipeline on calibration prompts; knows neither profiling nor validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.counting import Count
from ertacache.calibration.profiling import Progress, generators, split_runs
from ertacache.calibration.solving import make_policy, paper_distances
from ertacache.core.plan import TrajectoryPlan
from ertacache.core.refit import typical_distance
from ertacache.core.search import spread_schedule
from ertacache.core.solve import Fit, fit_plans
from ertacache.core.solver import Trajectory
from ertacache.core.threshold import sweep_profile
from ertacache.formats.firststeps import read_first_steps
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration import attach, record_run
from ertacache.integration.batches import micro_batches
from ertacache.integration.compat import Pipeline
from ertacache.integration.refit import RefitTask, refit_run

__all__ = ["REFINE_PROMPTS", "Reference", "collect_reference", "refine"]

REFINE_PROMPTS = 32  # by default: with half as many, prompts of a kind not among them stray
FITS = (
    Fit(history=4),
    Fit(history=4, ridge=1e-2),
    Fit(history=3),
    Fit(history=5, ridge=1e-4),
)
"""Ways to fit a schedule: strong ridges serve few computed steps, weak and long ones many."""


@dataclass(frozen=True, eq=False)
class Reference:
    """Untouched runs kept whole, for the closed-loop refit.

    Attributes:
        runs: prompts and seeds.
        latents: x_0 ... x_T, each of shape (P, ...).
    """

    runs: tuple[ProfiledPrompt, ...]
    latents: tuple[Tensor, ...]

    def arguments(self, part: slice) -> dict[str, Any]:
        """Prompts and noise of some of the runs, as a pipeline takes them."""
        runs = self.runs[part]
        return {"prompt": [run.prompt for run in runs], "generator": generators(runs)}


def collect_reference(
    pipe: Pipeline,
    runs: Sequence[ProfiledPrompt],
    kept: Sequence[tuple[Sequence[ProfiledPrompt], Trajectory]],
    *,
    batch_size: int,
    call: dict[str, Any],
    count: Count | None = None,
) -> Reference:
    """The latents of untouched runs, from those kept while profiling or run again."""
    found = {
        run: [x[place] for x in trajectory.latents]
        for batch, trajectory in kept
        for place, run in enumerate(batch)
    }
    missing = [run for run in runs if run not in found]
    for batch in split_runs(missing, batch_size):
        texts = [run.prompt for run in batch]
        trajectory, _ = record_run(pipe, prompt=texts, generator=generators(batch), **call)
        for place, run in enumerate(batch):
            found[run] = [x[place].cpu() for x in trajectory.latents]
        if count is not None:
            count(trajectory.num_steps * len(batch))
    steps = zip(*(found[run] for run in runs), strict=True)
    return Reference(tuple(runs), tuple(torch.stack(step) for step in steps))


def refine(
    pipe: Pipeline,
    policy: Policy,
    profile: Profile,
    *,
    reference: Reference,
    call: dict[str, Any],
    batch_size: int | None = None,
    progress: Progress | None = None,
    count: Count | None = None,
) -> Policy:
    """Refit a policy in closed loop, if that helps prompts it was not fitted on.

    Tried are the policy's own schedule, the paper's and the uniform one, fitted in the first of the
    ways of ``FITS``; then the best of them in the other ways; and the policy as it is. Each is
    fitted on one half of the prompts and judged on the other by its typical distance; the best is
    then fitted on all of them.

    Args:
        pipe: the pipeline, nothing attached.
        policy: the policy, as solved.
        profile: what it was solved from.
        reference: untouched runs of the calibration prompts.
        call: arguments of the pipeline, without prompts and generators.
        batch_size: prompts per call of the network; None is all at once. The pipeline itself is
            called with all prompts, whose latents it holds.
        progress: called with the candidates done and the candidates in all.
        count: told how often the network was asked.
    """
    half = len(reference.runs) // 2
    if half == 0:
        return policy
    schedules = _schedules(policy, profile)
    in_all = len(schedules) + len(FITS) + 1  # with the policy as it is, and the last refit
    tell = progress or (lambda done, calls: None)
    bench = _Bench(pipe, profile, reference, call, batch_size, count or (lambda calls: None))
    unrefined = bench.open_loop_error(policy)
    errors: dict[tuple[tuple[int, ...], Fit], float] = {}

    def attempt(steps: tuple[int, ...], fit: Fit) -> None:
        tell(len(errors) + 1, in_all)
        _, errors[steps, fit] = bench.refit(steps, fit, fitted=half)

    for steps in schedules:
        attempt(steps, FITS[0])
    best_steps, _ = min(errors, key=errors.__getitem__)
    for fit in FITS[1:]:
        attempt(best_steps, fit)
    best = min(errors, key=errors.__getitem__)
    if errors[best] < unrefined:
        tell(in_all - 1, in_all)
        plan, _ = bench.refit(*best)
        policy = replace(policy, plan=plan)
    tell(in_all, in_all)
    return policy


def _schedules(policy: Policy, profile: Profile) -> list[tuple[int, ...]]:
    """The policy's schedule, the paper's and the uniform one, each once."""
    budget, pinned = len(policy.compute_steps), {0, *read_first_steps(profile.provenance)}
    found = sweep_profile(*paper_distances(profile, "residual"))
    paper = next((steps for _, steps in sorted(found.items()) if len(steps) == budget), ())
    uniform = spread_schedule(policy.num_steps, budget, pinned)
    # Thresholds skip some budgets, and a later network's first step is not the paper's concern.
    others = [steps for steps in (paper, uniform) if pinned <= set(steps)]
    return list(dict.fromkeys([policy.compute_steps, *others]))


@dataclass(frozen=True, eq=False)
class _Bench:
    """Where candidates are tried: the pipeline, its reference runs, and how it is called."""

    pipe: Pipeline
    profile: Profile
    reference: Reference
    call: dict[str, Any]
    batch_size: int | None
    count: Count

    def refit(
        self, steps: tuple[int, ...], fit: Fit, *, fitted: int | None = None
    ) -> tuple[TrajectoryPlan, float]:
        """Fit a schedule in closed loop on the first prompts, or all; its plan and its error."""
        profile = self.profile
        (plan,) = fit_plans(profile.statistics, profile.nominal, schedules=[steps], fit=fit)
        return refit_run(
            self.pipe,
            make_policy(profile, plan),
            task=RefitTask(self.reference.latents, profile.nominal, fit, fitted=fitted),
            call=self.call | self.reference.arguments(slice(None)),
            batch_size=self.batch_size,
            count=self.count,
        )

    def open_loop_error(self, policy: Policy) -> float:
        """Typical distance of the second half of the prompts, planned from the first's runs."""
        profile, runs = self.profile, self.reference.runs
        half = len(runs) // 2
        (plan,) = fit_plans(
            profile.statistics.select([profile.prompts.index(run) for run in runs[:half]]),
            profile.nominal,
            schedules=[policy.compute_steps],
            fit=Fit(),
        )
        judged = slice(half, None)
        call = self.call | self.reference.arguments(judged) | {"output_type": "latent"}
        with (
            micro_batches(self.pipe, self.batch_size, prompts=len(runs) - half),
            attach(self.pipe, make_policy(profile, plan)) as handle,
        ):
            final = self.pipe(**call)[0]
        self.count(handle.stats.last.computed_steps * (len(runs) - half))
        return typical_distance(final, self.reference.latents[-1][judged].to(final))
