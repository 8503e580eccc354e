"""The contestants: our policies, the paper's, and every baseline, each at every budget.

Policies are solved for a number of computed steps. A baseline's parameter is searched on a batch of
calibration prompts until its FLOPs match the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from ertacache.baselines import Baseline, search_parameter
from ertacache.baselines.uniform import Uniform
from ertacache.bench.cost import count_flops
from ertacache.bench.journal import Journal
from ertacache.bench.results import FULL, TRAJECTORY
from ertacache.bench.workload import Workload
from ertacache.calibration.paper import PASSES, PaperCalibration
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import refit_budget
from ertacache.calibration.trial import measure_fits
from ertacache.core.plans import steps_for_speedup
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.integration.attach import Handle

__all__ = [
    "EXTRAPOLATIONS",
    "POLICIES",
    "Contestant",
    "baseline_contestants",
    "extrapolation_contestants",
    "policy_contestants",
]

PAPER: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "paper, no timesteps": {"adjust_timesteps": False},
    "paper, policy only": {"adjust_timesteps": False, "rectify": False},
}
"""The paper's ablation: name in the tables, parts that are left out."""

POLICIES = (TRAJECTORY, *PAPER)
"""Methods that run as a policy."""

EXTRAPOLATIONS: Mapping[str, int] = {f"our schedule, order {order}": order for order in range(3)}
"""Extrapolation of outputs on the compute schedule of trajectory: name, order."""

SEARCH_TRIES = 10

_PROFILE = "profile", 1.0  # its key in the journal

Attach = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class Contestant:
    """One method at one budget.

    Attributes:
        method: its name in the tables.
        budget: its target speed-up, 1 for the full run.
        attach: attaches it to the pipeline.
        compute_steps: steps on which the whole network runs; None for methods that save otherwise.
        setting: parameter of the method and its value.
        why_not: why the method does not apply; then it is not run.
    """

    method: str
    budget: float
    attach: Attach = nullcontext
    compute_steps: int | None = None
    setting: str | None = None
    why_not: str | None = None

    @property
    def key(self) -> tuple[str, float]:
        """Method and budget, which identify it."""
        return self.method, self.budget

    def same_run(self, other: Contestant) -> bool:
        """Whether a run of the other one is a run of this one, for another budget."""
        return (self.method, self.setting) == (other.method, other.setting)


def policy_contestants(
    work: Workload, budgets: Sequence[float], methods: Sequence[str], journal: Journal
) -> Iterator[Contestant]:
    """Profile once, then make every policy that the journal does not have."""
    wanted = [(method, budget) for method in methods for budget in budgets]
    if any(journal.policy(*key) is None for key in wanted):
        known = _profile(work, journal, with_trials=TRAJECTORY in methods)
        for budget in budgets:
            missing = [method for method in methods if journal.policy(method, budget) is None]
            for method, plan in _plans(work, known, budget, missing):
                only = Policy(known.fingerprint, plans=(plan,))
                journal.add_policy(method, budget, only)
    for method, budget in wanted:
        found = journal.policy(method, budget)
        assert found is not None
        steps, attached = len(found.default.compute_steps), partial(Handle, work.pipe, found)
        yield Contestant(method, budget, attached, steps, f"{steps} steps")


def _profile(work: Workload, journal: Journal, *, with_trials: bool) -> Policy:
    """The profile that every policy is made from: as the journal has it, or made now."""
    known = journal.policy(*_PROFILE)
    if known is None:
        known = profile_runs(work.session, work.calibration, keep=work.calibration)
        journal.add_policy(*_PROFILE, known)
    if with_trials and not known.fits:
        known = measure_fits(work.session, known, work.calibration)
        journal.add_policy(*_PROFILE, known)
    return known


def _plans(
    work: Workload, known: Policy, budget: float, methods: Sequence[str]
) -> Iterator[tuple[str, FittedPlan]]:
    """Ours, refitted, and the paper's, each for a number of computed steps."""
    steps = steps_for_speedup(work.steps, budget)
    if TRAJECTORY in methods:
        reference = work.session.reference(work.calibration)
        yield TRAJECTORY, refit_budget(work.session, known, reference, steps)
    yield from _paper_plans(work, known, steps, [name for name in methods if name in PAPER])


def _paper_plans(
    work: Workload, known: Policy, steps: int, methods: Sequence[str]
) -> Iterator[tuple[str, FittedPlan]]:
    """The paper's parts on one compute schedule, searched and fitted on the network."""
    if not methods:
        return
    calibration = PaperCalibration(work.session, known, work.calibration)
    progress, total = work.session.progress("paper"), PASSES + len(methods)
    found = calibration.search_budget(steps, progress=lambda done: progress(done, total))
    for done, method in enumerate(methods, PASSES + 1):
        plan = calibration.fit(found, **PAPER[method])
        progress(done, total)
        yield method, FittedPlan(plan, calibration.sigmas)


def extrapolation_contestants(
    work: Workload, budgets: Sequence[float], methods: Sequence[str], journal: Journal
) -> Iterator[Contestant]:
    """What the compute schedule of trajectory gives without its coefficients.

    The last step is computed, as extrapolation needs it: if trajectory reuses it, its last computed
    step is moved there.
    """
    for method in methods:
        for budget in budgets:
            ours = journal.policy(TRAJECTORY, budget)
            assert ours is not None
            computed = (*ours.default.compute_steps[:-1], work.steps - 1)
            baseline = Uniform(method, EXTRAPOLATIONS[method], computed)
            count = len(computed)
            attach = partial(baseline.attach, work.pipe, count, num_inference_steps=work.steps)
            yield Contestant(method, budget, attach, count, f"{count} steps")


def baseline_contestants(
    work: Workload, budgets: Sequence[float], baseline: Baseline, journal: Journal
) -> Iterator[Contestant]:
    """A calibrated baseline with its parameter searched for every budget, or why not."""
    why_not = baseline.applies(work.pipe)
    if why_not is not None:
        yield from (Contestant(baseline.name, budget, why_not=why_not) for budget in budgets)
        return
    ready = baseline.calibrate(work.pipe, work.run_calibration)
    parameter = ready.parameter(work.pipe, num_inference_steps=work.steps)
    runs = work.calibration[
        : work.session.batch_size
    ]  # a whole batch: some baselines decide per batch

    def attached(value: float) -> AbstractContextManager[Any]:
        return ready.attach(work.pipe, value, num_inference_steps=work.steps)

    def count(method: Attach = nullcontext) -> int:
        with method():
            return count_flops(work.pipe, lambda: work.session.run(runs, output_type="latent"))

    full = journal.flops(FULL, 1.0, count)

    def ratio(value: float) -> float:
        return journal.flops(baseline.name, value, lambda: count(partial(attached, value))) / full

    for budget in budgets:
        target = steps_for_speedup(work.steps, budget) / work.steps  # as many FLOPs as our policies
        value, _ = search_parameter(parameter, ratio, target, tries=SEARCH_TRIES)
        yield Contestant(
            baseline.name,
            budget,
            partial(attached, value),
            compute_steps=int(value) if parameter.counts_steps else None,
            setting=f"{parameter.name} {value:.4g}",
        )
