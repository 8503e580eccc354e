"""Which plan a run follows: one fitted for it, one solved when it starts, or none.

Plans are kept by schedule and target, so that the second run on a schedule costs nothing.
"""

from __future__ import annotations

import logging
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ertacache.core.gram import Schedule
from ertacache.core.plans import PaperPlan, Target
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.solve import PlanSolver

if TYPE_CHECKING:
    from ertacache.integration.private_api import Scheduler

__all__ = ["PlanChooser", "remember"]

KEPT = 64  # schedules, and plans
_LOG = logging.getLogger("ertacache")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

LATER = ", if it began in noise as the profiled ones; it begins later and comes less close"

NO_GAIN = (
    "no plan with {budget} of {steps} steps computed is predicted to be better than plain reuse "
    "on this sigma schedule, so every step is computed: give a smaller speed-up, or calibrate at "
    "these settings"
)
NO_PSNR = (
    "no plan is predicted to reach {psnr:g} dB in this run of {steps} steps, so every step is "
    "computed: give a smaller min_psnr"
)


def remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keep a value, and forget the oldest if there are many: a server may see any number of sizes.

    Example:
        >>> known = {number: "" for number in range(KEPT)}
        >>> remember(known, KEPT, "")
        >>> len(known) == KEPT, min(known)
        (True, 1)
    """
    known[key] = value
    if len(known) > KEPT:
        del known[next(iter(known))]


def _on_cpu() -> AbstractContextManager[object]:
    """New tensors on the CPU, whatever the default device is.

    Nothing is entered if it is the CPU: the context slows every operation, and a run waits.
    """
    return nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


class PlanChooser:
    """The plans of one policy for the runs of one pipeline.

    Attributes:
        policy: the policy.
        target: of the next run; the default is the policy's first plan.
        seconds: spent on choosing plans so far, nearly all of it on a schedule's first run.
    """

    def __init__(self, policy: Policy, target: Target) -> None:
        """Begin with no plan chosen.

        Raises:
            PolicyError: if there is neither a target nor a plan.
        """
        if target == Target():
            policy.default  # noqa: B018  it raises if there is none
        self.policy, self.target, self.seconds = policy, target, 0.0
        self._solver: PlanSolver | None = None
        self._schedules: dict[tuple[bytes, bytes, int], Schedule] = {}
        self._chosen: dict[tuple[Schedule, Target], FittedPlan | None] = {}
        self._single: PlanChooser | None = None

    @property
    def adjusts_sigmas(self) -> bool:
        """Whether runs follow a plan of the paper's method that changes their sigmas."""
        if self.target != Target():
            return False
        first = self.policy.default
        return isinstance(first.plan, PaperPlan) and not torch.equal(
            first.plan.sigmas, first.sigmas
        )

    def without_branch(self) -> PlanChooser:
        """The same with plans of one history only, for runs that have no guidance to show.

        Plans with a second one are replaced by plans that are solved; without a profile, by none.
        """
        policy, target = self.policy, self.target
        kept = tuple(plan for plan in policy.plans if not getattr(plan.plan, "branch", False))
        if len(kept) == len(policy.plans) or not (kept or policy.profile is not None):
            return self
        if target == Target() and kept[:1] != policy.plans[:1]:
            target = Target(speedup=policy.default.speedup)
        if self._single is None:
            self._single = PlanChooser(replace(policy, plans=kept), target)
        self._single.target = target
        return self._single

    def choose(self, scheduler: Scheduler, *, begin: int = 0) -> FittedPlan | None:
        """Return the plan of a run that starts now, None if every step is to be computed.

        Args:
            scheduler: after ``set_timesteps``.
            begin: the step with which the run begins.

        Raises:
            PolicyError: if there is no plan for the run, and no profile to solve one from.
        """
        start = perf_counter()
        with _on_cpu():
            schedule = self.schedule(scheduler, begin)
        found = self.choose_for(schedule)
        self.seconds += perf_counter() - start
        return found

    def choose_for(self, schedule: Schedule) -> FittedPlan | None:
        """The same for a schedule that was read already; its plan is kept with the object."""
        key = schedule, self.target
        if key not in self._chosen:
            self._check_direction(schedule)
            with _on_cpu():
                remember(self._chosen, key, self._choose(schedule))
        return self._chosen[key]

    def schedule(self, scheduler: Scheduler, begin: int) -> Schedule:
        """The schedule of a run, read off the scheduler once."""
        # Here, so that loops which are not diffusers' do without it.
        from ertacache.integration.schedulers import read_schedule

        own = getattr(scheduler, "sigmas", None)
        levels = own if isinstance(own, Tensor) else scheduler.timesteps
        key = _bytes(levels), _bytes(scheduler.timesteps), begin
        if key not in self._schedules:
            remember(self._schedules, key, read_schedule(scheduler, begin=begin))
        return self._schedules[key]

    def _check_direction(self, schedule: Schedule) -> None:
        """Raise if the network outputs data minus noise in one run, noise minus data in the other.

        Both are called a flow, and only the steps of the scheduler tell them apart.
        """
        profile = self.policy.profile
        if profile is None:
            return  # a plan fits a run only if its outputs have the same sign
        ours, theirs = (s.nominal[:, 1].sum().item() for s in (profile.schedule, schedule))
        if ours * theirs < 0:
            raise PolicyError(
                "the outputs of the network have the opposite sign of the calibrated ones, such as "
                "data minus noise in place of noise minus data: return them with a minus sign, or "
                "calibrate this run"
            )

    def _choose(self, schedule: Schedule) -> FittedPlan | None:
        policy, steps = self.policy, schedule.num_steps
        if self.target == Target():
            first = policy.default
            if first.fits(schedule):
                return first
            if first.method == "paper":
                raise PolicyError(_other_run(policy, schedule, "is of the paper's method"))
            share = math.ceil(steps * len(first.compute_steps) / first.num_steps - 1e-9)
            return self._plan(schedule, max(2, share))
        if self.target.min_psnr is not None:
            return self._reach(schedule, self.target.min_psnr)
        budget = self.target.budget(steps)
        assert budget is not None
        return self._plan(schedule, budget)

    def _plan(self, schedule: Schedule, budget: int) -> FittedPlan | None:
        """The plan with so many computed steps: a fitted one, or one that is solved now."""
        fitted = self.policy.find_plan(schedule, budget)
        if fitted is not None:
            return fitted
        steps, start = schedule.num_steps, perf_counter()
        if budget >= steps:
            return None  # nothing to reuse
        solver = self.solver(schedule)
        solved = solver.solve(schedule, max(budget, solver.budgets(schedule)[0]))
        if solved is None:
            warnings.warn(NO_GAIN.format(budget=budget, steps=steps), stacklevel=2)
            return None
        error = solved.predicted_error
        assert error is not None
        _LOG.info(
            "solved a plan for this sigma schedule: %d of %d steps computed, predicted PSNR to the "
            "full run %.1f dB%s; took %.0f ms",
            len(solved.compute_steps),
            steps,
            solver.psnr(error),
            LATER if solver.begins_later(schedule) else "",
            1e3 * (perf_counter() - start),
        )
        return solved

    def _reach(self, schedule: Schedule, psnr: float) -> FittedPlan | None:
        """The plan with the fewest computed steps that reaches a PSNR, measured or predicted."""
        solver = self.solver(schedule)
        for computed, error in sorted(solver.curve(schedule).items()):
            fitted = self.policy.find_plan(schedule, computed)
            row = None if fitted is None else fitted.measured
            reached = solver.psnr(error) if row is None else row.psnr
            if reached >= psnr and computed < schedule.num_steps:
                return self._plan(schedule, computed)
        warnings.warn(NO_PSNR.format(psnr=psnr, steps=schedule.num_steps), stacklevel=2)
        return None

    def solver(self, schedule: Schedule) -> PlanSolver:
        """What solves plans; raise if the policy has no profile."""
        if self.policy.profile is None:
            raise PolicyError(_other_run(self.policy, schedule, "comes without a profile"))
        if self._solver is None:
            self._solver = PlanSolver(self.policy)
        return self._solver


def _other_run(policy: Policy, schedule: Schedule, why: str) -> str:
    """Why the first plan of a policy cannot be followed on a schedule, and what to do."""
    plan = policy.default
    steps, computed = schedule.num_steps, len(plan.compute_steps)
    name = policy.provenance.get("model", "")
    model = name if name and "\n" not in name else policy.fingerprint.pipeline
    remedy = f"calibrate {model} at these settings"
    if steps != plan.num_steps:
        return (
            f"the run has {steps} steps, but the plan is for {plan.num_steps} and {why}: pass "
            f"num_inference_steps={plan.num_steps}, of which {computed} are computed, or {remedy}"
        )
    if plan.fits(schedule):
        return (
            f"the plan is for {computed} of {steps} computed steps and {why}: leave speedup=, "
            "compute_steps= and min_psnr= out, or calibrate for them"
        )
    return (
        f"the run's sigma schedule is not the one of the plan, which {why}: leave shift, size, "
        f"sigmas= and scheduler as calibrated, or {remedy}"
    )


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().double().numpy().tobytes()  # numpy has no bfloat16
