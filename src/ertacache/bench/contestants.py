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

from ertacache.baselines import BASELINES, Baseline, search_knob
from ertacache.bench.cost import count_flops
from ertacache.bench.journal import Journal
from ertacache.bench.results import FULL, TRAJECTORY
from ertacache.bench.workload import Workload
from ertacache.calibration.paper import fit_paper_plan, make_walk, search_schedule
from ertacache.calibration.profiling import Progress, profile
from ertacache.calibration.refining import Reference, collect_reference, refine
from ertacache.calibration.solving import make_policy, solve
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.integration import attach

__all__ = [
    "POLICIES",
    "Contestant",
    "baseline_contestants",
    "method_names",
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

SEARCH_TRIES = 10
_STEP_COUNTS = ("steps", "computed steps")  # parameters of baselines that count steps

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


def method_names() -> list[str]:
    """Every method, in the order of the tables."""
    return [*POLICIES, *BASELINES]


def policy_contestants(
    work: Workload,
    budgets: Sequence[float],
    methods: Sequence[str],
    journal: Journal,
    progress: Progress | None = None,
) -> Iterator[Contestant]:
    """Profile once, then make every policy that the journal does not have."""
    wanted = [(method, budget) for method in methods for budget in budgets]
    if any(journal.policy(*key) is None for key in wanted):
        known, reference = _profile(work, progress)
        for budget in budgets:
            missing = [method for method in methods if journal.policy(method, budget) is None]
            for method, policy in _policies(work, known, reference, budget, missing):
                journal.add_policy(method, budget, policy)
    for method, budget in wanted:
        found = journal.policy(method, budget)
        assert found is not None
        steps, attached = len(found.compute_steps), partial(attach, work.pipe, found)
        yield Contestant(method, budget, attached, steps, f"{steps} steps")


def _profile(work: Workload, progress: Progress | None) -> tuple[Profile, Reference]:
    """The profile of the calibration prompts, and their full runs."""
    kept: list[Any] = []
    known = profile(
        work.pipe,
        [run.prompt for run in work.calibration],
        seed=work.calibration[0].seed,
        batch_size=work.batch_size,
        progress=progress,
        observe=lambda runs, run: kept.append((runs, run)),
        **work.call,
    )
    reference = collect_reference(
        work.pipe, known.prompts, kept, batch_size=work.batch_size, call=work.call
    )
    return known, reference


def _policies(
    work: Workload, known: Profile, reference: Reference, budget: float, methods: Sequence[str]
) -> Iterator[tuple[str, Policy]]:
    """Ours, refitted, and the paper's, each for a number of computed steps."""
    steps = round(work.steps / budget)
    if TRAJECTORY in methods:
        solved = solve(known, compute_steps=steps, embed_profile=False)
        refitted = refine(
            work.pipe,
            solved,
            known,
            reference=reference,
            call=work.call,
            batch_size=work.batch_size,
        )
        yield TRAJECTORY, refitted
    yield from _paper_policies(work, known, steps, [name for name in methods if name in PAPER])


def _paper_policies(
    work: Workload, known: Profile, steps: int, methods: Sequence[str]
) -> Iterator[tuple[str, Policy]]:
    """The paper's parts on one compute schedule, searched and fitted on the network."""
    if not methods:
        return
    walk = make_walk(known, known.prompts, call=work.call, batch_size=work.batch_size)
    found = search_schedule(work.pipe, walk, known, budget=steps)
    for method in methods:
        yield method, make_policy(known, fit_paper_plan(work.pipe, walk, found, **PAPER[method]))


def baseline_contestants(
    work: Workload, budgets: Sequence[float], baseline: Baseline, journal: Journal
) -> Iterator[Contestant]:
    """A calibrated baseline with its parameter searched for every budget, or why not."""
    why_not = baseline.applies(work.pipe)
    if why_not is not None:
        yield from (Contestant(baseline.name, budget, why_not=why_not) for budget in budgets)
        return
    ready = baseline.calibrate(work.pipe, work.run_calibration)
    parameter = ready.knob(work.pipe, num_inference_steps=work.steps)
    runs = work.calibration[: work.batch_size]  # a whole batch: some baselines decide per batch

    def attached(value: float) -> AbstractContextManager[Any]:
        return ready.attach(work.pipe, value, num_inference_steps=work.steps)

    def count(method: Attach = nullcontext) -> int:
        with method():
            return count_flops(work.pipe, lambda: work.run(runs, output_type="latent"))

    full = journal.flops(FULL, 1.0, count)

    def ratio(value: float) -> float:
        return journal.flops(baseline.name, value, lambda: count(partial(attached, value))) / full

    for budget in budgets:
        value, _ = search_knob(parameter, ratio, 1 / budget, tries=SEARCH_TRIES)
        yield Contestant(
            baseline.name,
            budget,
            partial(attached, value),
            compute_steps=int(value) if parameter.name in _STEP_COUNTS else None,
            setting=f"{parameter.name} {value:.4g}",
        )
