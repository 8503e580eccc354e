"""The closed-loop refit on a pipeline: run a schedule and fit each step where it really is.

All calibration prompts go through one call of the pipeline, in lockstep; the network sees them in
micro-batches. Knows neither how the schedule was found nor what becomes of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ertacache.core.plan import TrajectoryPlan
from ertacache.core.refit import fit_step, typical_distance
from ertacache.core.sampler import combine
from ertacache.core.solve import Fit
from ertacache.formats.policy import Policy
from ertacache.integration.attach import Handle
from ertacache.integration.batches import micro_batches
from ertacache.integration.compat import Pipeline, Scheduler
from ertacache.integration.scheduler import StepCall
from ertacache.integration.updates import LinearStep, precise

__all__ = ["RefitTask", "refit_run"]


@dataclass(frozen=True, eq=False)
class RefitTask:
    """What the coefficients of a schedule are fitted to.

    Attributes:
        latents: the reference latents x_0 ... x_T of the calibration prompts, each (P, ...).
        nominal: the scheduler's first-order update, shape (T, 2).
        fit: how coefficients are fitted.
        fitted: number of prompts, the first ones, that are fitted on; the error is that of the
            others, which run along. None fits on all, and the error is theirs.
    """

    latents: Sequence[Tensor]
    nominal: Tensor
    fit: Fit
    fitted: int | None = None


def refit_run(
    pipe: Pipeline,
    policy: Policy,
    *,
    task: RefitTask,
    call: dict[str, Any],
    batch_size: int | None = None,
    count: Callable[[int], None] | None = None,
) -> tuple[TrajectoryPlan, float]:
    """Run a policy's schedule on calibration prompts and fit its coefficients anew.

    Args:
        pipe: the pipeline, nothing attached.
        policy: whose computed steps are taken.
        task: what to fit to.
        call: arguments of the pipeline that gave the task's latents, with prompts and generators.
        batch_size: prompts per call of the network; None is all of them at once.
        count: told how often the network was asked, once per prompt and computed step.

    Returns:
        The plan, and the typical distance of the final latents to the reference ones.
    """
    update = _RefitUpdate(pipe.scheduler, task)
    prompts = len(task.latents[0])
    with (
        micro_batches(pipe, batch_size, prompts=prompts),
        Handle(pipe, policy, update=update) as handle,
    ):
        pipe(**(call | {"output_type": "latent"}))
    if count is not None:
        count(handle.stats.last.computed_steps * prompts)
    z = update.coefficients
    return TrajectoryPlan(policy.compute_steps, z[:, 0].clone(), z[:, 1:].clone()), update.error


class _RefitUpdate:
    """The rectified update with coefficients that are fitted when a step is taken."""

    def __init__(self, scheduler: Scheduler, task: RefitTask) -> None:
        self._task, self._linear = task, LinearStep(scheduler)
        self._past: list[Tensor] = []
        shape = len(task.nominal), 1 + task.fit.history
        self.coefficients = torch.zeros(shape, dtype=torch.float64)
        self.error = torch.inf

    def start(self) -> None:
        """Begin a run: nothing to do."""

    def step(self, k: int, call: StepCall, *, computed: bool) -> Any:
        """Fit step ``k`` and take it."""
        task = self._task
        if computed:
            self._past = [call.model_output.detach(), *self._past][: task.fit.history]
        x = precise(call.sample)
        target = task.latents[k + 1].to(x.device)
        n = task.fitted
        past = [v[:n] for v in self._past]
        z = fit_step(x[:n], past, target[:n], nominal=task.nominal[k], fit=task.fit)
        self.coefficients[k, : len(z)] = z
        reached = combine(x, self._past, z.tolist())
        judged = slice(n or 0, None)
        self.error = typical_distance(reached[judged], target[judged])
        return self._linear.give(k, call, reached)

    def held(self) -> Iterable[Tensor]:
        """Return the history."""
        return self._past

    def close(self, *, restore: bool) -> None:
        """Let go of the history."""
        self._past = []
