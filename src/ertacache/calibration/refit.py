"""The closed-loop refit: solved plans, fitted again on the latents that a run really reaches.

Runs the pipeline on calibration prompts, all of them in lockstep. A refit is kept only if it helps
prompts that it was not fitted on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ertacache.calibration.lockstep import refit_plans, run_plan
from ertacache.calibration.reference import Reference
from ertacache.calibration.rehearsal import rehearse
from ertacache.calibration.session import (
    HELDOUT_SEED,
    Progress,
    Session,
    Stage,
    calibrated_steps,
    interleave_runs,
    open_session,
)
from ertacache.calibration.trial import FIRST, Search, by_group, regret, rest_of
from ertacache.calibration.validate import hold_out, validate
from ertacache.core.distance import typical_distance
from ertacache.core.paper import reuse_distances, sweep_profile
from ertacache.core.plans import Target, TrajectoryPlan
from ertacache.core.search import spread_schedule
from ertacache.core.simulate import Fit
from ertacache.distributed import ALONE, Processes
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.guided import MAX_VALUES, GuidedCoefficients
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.hub import open_policy
from ertacache.integration.identity import check_pipeline, guidance_number
from ertacache.integration.private_api import Pipeline
from ertacache.integration.solve import PlanSolver, profile_of

__all__ = ["REFIT_PROMPTS", "check_refit_prompts", "refit", "refit_budget"]

REFIT_PROMPTS = 32  # by default: with half as many, out-of-distribution prompts diverge
ATTEMPTS = 15  # candidates, about
HISTORIES = (5, 3)  # besides 4: a long one suits many computed steps
ALIKE = 1.0  # all prompts count alike, in coefficients that serve every guidance
SHARE = 0.1
SHARES = (0.3, 0.0, ALIKE)
"""How much prompts of other guidance count in the coefficients of one value of it: the share that
is searched with, and those that are tried in the end."""


def refit(
    pipe: Pipeline,
    policy: Policy | str | os.PathLike[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    heldout: Sequence[str] | None = None,
    batch_size: int = 1,
    refit_prompts: int = REFIT_PROMPTS,
    resume: str | os.PathLike[str] | None = None,
    processes: Processes = ALONE,
    stage: Stage | None = None,
    **call: Any,
) -> Policy:
    """Add a plan to a policy, refitted in closed loop for the runs that are called like this.

    Number of steps, size, shift, scheduler and strength may be others than the profiled ones. The
    prompts are those of the profile, with their seeds and the arguments that differ between them.

    Args:
        pipe: the pipeline, nothing attached.
        policy: a policy with a profile, the path of its file, or ``hub:user/repo``.
        speedup: at least this many times fewer computed steps than steps; by default that of the
            policy's first plan.
        compute_steps: this many computed steps, in place of a speed-up.
        heldout: prompts to validate on; None does not validate. Profiled runs of them are left out
            of the fit, unless there are no others.
        batch_size: prompts per call of the network.
        refit_prompts: calibration prompts to refit on; their latents are kept.
        resume: folder that finished runs are kept in until the plan is made; the same call
            continues from it, and at the end it is removed.
        processes: those that share the runs, each with the same pipeline and arguments.
        stage: called with the name of every stage; returns what is called with its progress.
        **call: arguments of the pipeline.

    Returns:
        The policy with one plan more; one for the same runs and budget is replaced.
    """
    policy = _from_main(open_policy(policy), processes)
    profile = profile_of(policy)
    target = Target(speedup, compute_steps)
    if target == Target():
        target = Target(speedup=policy.default.speedup)
    check_pipeline(pipe, policy)
    call = calibrated_steps(policy) | call | _varied(pipe, profile, call)
    with open_session(
        pipe, call, batch_size=batch_size, stage=stage, processes=processes, resume=resume
    ) as session:
        plan = _refit_plan(session, policy, target, heldout, check_refit_prompts(refit_prompts))
        return policy.with_plan(plan)


def _from_main(policy: Policy, processes: Processes) -> Policy:
    """The policy of the main process, should that of another be older."""
    if processes.count == 1:
        return policy
    found = processes.from_main("policy", policy._to_bytes())
    return policy if processes.is_main else Policy._from_bytes(found, "the policy")


def _refit_plan(
    session: Session, policy: Policy, target: Target, heldout: Sequence[str] | None, prompts: int
) -> FittedPlan:
    """A plan of a policy for a target, refitted on so many prompts, and validated."""
    unseen = None if heldout is None else session.number_runs(heldout, HELDOUT_SEED)
    fitted = policy if heldout is None else hold_out(policy, heldout)
    runs = interleave_runs(profile_of(fitted).runs)[:prompts]
    expected = rehearse(session, runs[0], lockstep=len(runs) > 1)
    if expected is not None:
        _budget(target, expected)
    reference = session.reference(runs)
    budget = _budget(target, reference.schedule.num_steps)
    plan = refit_budget(session, fitted, reference, budget)
    if unseen is not None:
        (plan,) = validate(session, fitted, [plan], unseen)
    return plan


def _budget(target: Target, steps: int) -> int:
    """The number of computed steps in a run; raise if it is impossible."""
    budget = target.budget(steps)
    if budget is None or not 2 <= budget < steps:
        raise ValueError(f"cannot compute {budget} of {steps} steps: 2 to {steps - 1} are possible")
    return budget


def _varied(pipe: Pipeline, profile: Profile, call: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Arguments that differ between the profiled runs, with all their values.

    Raises:
        ValueError: if the call has other values for one of them.
    """
    pairs = dict.fromkeys(pair for run in profile.runs for pair in run.arguments)
    found: dict[str, list[Any]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    varied = Session(pipe, call).varied
    for name in varied.keys() | (call.keys() & found.keys()):
        if set(varied.get(name, [call[name]])) != set(found.get(name, [])):
            has = ", ".join(map(str, found[name])) if name in found else "one value of it"
            raise ValueError(
                f"{name} is {call[name]}, but the profiled runs have {has}, and a refit runs them "
                "as they are: leave it out, or calibrate with these values"
            )
    return found


def check_refit_prompts(count: int) -> int:
    """Return a number of prompts to refit on; raise if it is not positive."""
    if count < 1:
        raise ValueError(f"refit_prompts must be at least 1, got {count}")
    return count


def refit_budget(session: Session, policy: Policy, reference: Reference, budget: int) -> FittedPlan:
    """The plan of a budget, refitted if that helps prompts that it was not fitted on.

    Candidates are the plan as solved; the solved compute schedule with several ridges; others that
    were searched, the paper's and the uniform one; other lengths of the history; the latent divided
    into groups; a second history. Each is fitted on one half of the prompts and compared on the
    other, with coefficients for every value of guidance if the prompts differ in it. The best is
    run with the halves exchanged as well, to measure its error on all prompts, and then fitted on
    all of them.

    Args:
        session: the pipeline.
        policy: with the profile that plans are solved from.
        reference: full runs of calibration prompts, those of the profile, on any schedule.
        budget: number of computed steps.
    """
    solver, schedule = PlanSolver(policy), reference.schedule
    solved = solver.solve(schedule, budget) or solver.plain(schedule, budget)
    fitted, others = profile_of(policy).halves(reference.runs)
    if not others:
        return solved
    progress = session.progress("refit")
    trials = _Trials(session, policy, reference, fitted, others, _guidance_of(fitted, others))
    open_loop = _Candidate(solved.compute_steps, None, ALIKE, trials.open_loop(budget))
    schedules = _schedules(solved, solver, reference)
    best = trials.search(schedules, solver.order(schedule, budget), progress)
    if not trials.better(best, open_loop, 1.0):
        best = open_loop
    swapped = replace(trials, fitted=others, others=fitted)
    again = swapped.open_loop(budget) if best.fit is None else swapped.distances(best)
    error = typical_distance(torch.cat([best.distances, again]))
    found = replace(solved, measured_error=error)
    if best.fit is not None:
        plan, guided = trials.fit_all(best)
        found = replace(found, plan=plan, guided=guided)
    progress(ATTEMPTS, ATTEMPTS)
    return found


def _schedules(
    solved: FittedPlan, solver: PlanSolver, reference: Reference
) -> list[tuple[int, ...]]:
    """The solved compute schedule, others that were searched, the paper's, the uniform one."""
    budget, pinned = len(solved.compute_steps), solver.pinned(reference.schedule)
    pinned |= {0, *reference.facts.expert_steps}
    uniform = spread_schedule(reference.schedule.num_steps, budget, pinned)
    others = solver.searched(reference.schedule, budget)
    if solver.profile.schedule.same_run(reference.schedule):
        others += _paper_schedule(solver.profile, budget)
    # Thresholds skip some budgets, and the paper's schedule does not pin a later network's step.
    found = [steps for steps in (*others, uniform) if pinned <= set(steps)]
    return list(dict.fromkeys([solved.compute_steps, *found]))


def _paper_schedule(profile: Profile, budget: int) -> list[tuple[int, ...]]:
    found = sweep_profile(*reuse_distances(profile.statistics, "residual"))
    return [steps for _, steps in sorted(found.items()) if len(steps) == budget][:1]


class _Guidance(NamedTuple):
    """The guidance argument in which runs differ.

    Attributes:
        argument: its name.
        values: ascending.
    """

    argument: str
    values: tuple[float, ...]

    def place(self, run: ProfiledPrompt) -> int:
        """Which of the values a run has."""
        ((name, given),) = run.arguments
        value = guidance_number(name, given)
        assert value is not None
        return self.values.index(value)


def _guidance_of(*halves: Sequence[ProfiledPrompt]) -> _Guidance | None:
    """Argument and values if runs differ in guidance alone, with every value in each half."""
    kinds = {run.arguments for half in halves for run in half}
    names = {name for kind in kinds for name, _ in kind}
    if len(kinds) < 2 or len(names) != 1 or any(len(kind) != 1 for kind in kinds):
        return None
    found = [{guidance_number(*run.arguments[0]) for run in half} for half in halves]
    values = [value for value in found[0] if value is not None]
    if not 2 <= len(values) <= MAX_VALUES or any(half != set(values) for half in found):
        return None
    return _Guidance(names.pop(), tuple(sorted(values)))


class _Candidate(NamedTuple):
    """A plan that was run.

    Attributes:
        steps: its computed steps.
        fit: how it was refitted; None if it is as solved.
        share: how much prompts of other guidance counted in the coefficients of each value.
        distances: of the prompts that it was not fitted on, shape (P,).
    """

    steps: tuple[int, ...]
    fit: Fit | None
    share: float
    distances: Tensor


@dataclass(frozen=True, eq=False)
class _Trials:
    """Candidates are run here, fitted on one half of the prompts.

    Attributes:
        session: the pipeline.
        policy: with the profile.
        reference: full runs of all prompts.
        fitted: runs that candidates are fitted on.
        others: runs that they are compared on.
        guidance: in which the runs differ; None if they differ in nothing, or in anything else.
    """

    session: Session
    policy: Policy
    reference: Reference
    fitted: list[ProfiledPrompt]
    others: list[ProfiledPrompt]
    guidance: _Guidance | None = None

    def search(
        self, schedules: Sequence[tuple[int, ...]], order: int, progress: Progress
    ) -> _Candidate:
        """The best refit: of the first compute schedule, then of the others, then of its parts."""
        done, steps = 0, schedules[0]
        share = ALIKE if self.guidance is None else SHARE

        def attempt(fit: Fit) -> _Candidate:
            nonlocal done
            progress(done, max(ATTEMPTS, done + 1))
            done += 1
            tried = _Candidate(steps, fit, share, torch.empty(0))
            return tried._replace(distances=self.distances(tried))

        search = Search(attempt, self.better, Fit(ridge=FIRST, order=order))
        search.climb_ridges()
        for steps in schedules[1:]:  # noqa: B007  attempts are on these steps
            search.challenge(search.fit)
        steps = search.best.steps
        for history in HISTORIES:
            if search.challenge(replace(search.fit, history=history)):
                break
        search.try_groups(self.reference.finest)
        if self.reference.facts.branch:
            search.try_branch()
        for share in SHARES if self.guidance else ():  # noqa: B007  and with this share
            search.challenge(search.fit)
        return search.best

    def distances(self, tried: _Candidate) -> Tensor:
        """Distances of one half under a candidate that is refitted on the other."""
        _, found = self._refit(tried, self.fitted)
        return found[self.reference.places(self.others)]

    def fit_all(self, best: _Candidate) -> tuple[TrajectoryPlan, GuidedCoefficients | None]:
        """The plan refitted on all prompts, and coefficients for every guidance if they help."""
        runs = self.reference.runs
        (plan,), _ = self._refit(best._replace(share=ALIKE), runs)
        if self.guidance is None or best.share == ALIKE:
            return plan, None
        plans, _ = self._refit(best, runs)
        coefficients = torch.stack([each.coefficients for each in plans])
        return plan, GuidedCoefficients(*self.guidance, coefficients)

    def _refit(
        self, tried: _Candidate, fitted: Sequence[ProfiledPrompt]
    ) -> tuple[list[TrajectoryPlan], Tensor]:
        """A candidate refitted on some runs, for every guidance; the distances of all runs."""
        assert tried.fit is not None
        runs, profile = self.reference.runs, profile_of(self.policy)
        known = dict(zip(profile.runs, profile.weights.tolist(), strict=True))
        counted = [known[run] if run in fitted else 0.0 for run in runs]
        weights, follows = torch.tensor([counted], dtype=torch.float64), [0] * len(runs)
        if self.guidance is not None and tried.share != ALIKE:
            follows = [self.guidance.place(run) for run in runs]
            own = torch.eye(len(self.guidance.values), dtype=torch.float64)[:, follows]
            weights = weights * own.clamp_min(tried.share)
        return refit_plans(
            self.session,
            self.reference,
            tried.steps,
            fingerprint=self.policy.fingerprint,
            fit=tried.fit,
            weights=weights,
            follows=follows,
        )

    def open_loop(self, budget: int) -> Tensor:
        """Distances of one half under a plan solved from the rest of the profile."""
        part = rest_of(profile_of(self.policy), self.others)
        solver, schedule = PlanSolver(replace(self.policy, profile=part)), self.reference.schedule
        solved = solver.solve(schedule, budget) or solver.plain(schedule, budget)
        assert isinstance(solved.plan, TrajectoryPlan)
        unseen = self.reference.select(self.reference.places(self.others))
        facts = self.policy.fingerprint
        return run_plan(self.session, unseen, solved.plan, fingerprint=facts, phase="refit")

    def better(self, one: _Candidate, other: _Candidate, margin: float) -> bool:
        """Whether the worst kind of run of one is better than that of the other by a factor."""
        found = regret([by_group(self.others, c.distances) for c in (one, other)])
        return found[0] * margin < found[1]
