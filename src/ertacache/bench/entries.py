"""Who takes part: our policies, the paper's, and every rival, each at every budget.

An entry is a method turned to a budget, ready to be attached. Policies are solved for a number of
computed steps; a rival's knob is searched on a batch of calibration prompts until the FLOPs fit.
Knows how a method is prepared, not how it is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ertacache.baselines import BASELINES, Baseline, search_knob
from ertacache.bench.cost import count_flops
from ertacache.bench.records import Journal
from ertacache.bench.workload import Workload
from ertacache.calibration.paper import fit_paper_plan, make_walk, search_schedule
from ertacache.calibration.profiling import Progress, profile
from ertacache.calibration.refining import Reference, collect_reference, refine
from ertacache.calibration.solving import make_policy, solve
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.integration import attach

__all__ = ["OURS", "Entry", "full_entry", "method_names", "policy_entries", "rival_entries"]

PAPER: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "paper, no timesteps": {"adjust_timesteps": False},
    "paper, policy only": {"adjust_timesteps": False, "rectify": False},
}
"""The paper's ablation: name in the table, the parts that are left out."""

OURS = ("trajectory", *PAPER)
"""What runs as a policy of ours."""

SEARCH_TRIES = 10

Attach = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class Entry:
    """One method at one budget.

    Attributes:
        method: its name in the tables.
        budget: the speed-up it is turned to, 1 for the full run.
        attach: puts it on the pipeline; None if it cannot take part.
        compute_steps: steps on which the whole network runs; None where that says nothing.
        knob: what it was turned to, in words.
        why_not: why it cannot take part.
    """

    method: str
    budget: float
    attach: Attach | None
    compute_steps: int | None = None
    knob: str | None = None
    why_not: str | None = None


def method_names() -> list[str]:
    """Every method, in the order of the tables."""
    return [*OURS, *BASELINES]


def full_entry(work: Workload) -> Entry:
    """The untouched pipeline."""
    return Entry("full", 1.0, nullcontext, work.steps)


def policy_entries(
    work: Workload,
    budgets: Sequence[float],
    methods: Sequence[str],
    journal: Journal,
    progress: Progress | None = None,
) -> Iterator[Entry]:
    """Profile once, then make every asked policy; all of them are calibrated on the network."""
    wanted = [(method, budget) for method in methods for budget in budgets]
    if any(journal.policy(*key) is None for key in wanted):
        known, reference = _learn(work, progress)
        for budget in budgets:
            missing = [method for method in methods if journal.policy(method, budget) is None]
            for method, policy in _policies(work, known, reference, budget, missing):
                journal.keep_policy(method, budget, policy)
    for method, budget in wanted:
        found = journal.policy(method, budget)
        assert found is not None
        yield _policy_entry(work, method, budget, found)


def _learn(work: Workload, progress: Progress | None) -> tuple[Profile, Reference]:
    """The profile of the calibration prompts, and their untouched runs."""
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
    """Ours, refined, and the paper's, each for a number of computed steps."""
    steps = round(work.steps / budget)
    if "trajectory" in methods:
        solved = solve(known, compute_steps=steps, embed_profile=False)
        yield (
            "trajectory",
            refine(
                work.pipe,
                solved,
                known,
                reference=reference,
                call=work.call,
                batch_size=work.batch_size,
            ),
        )
    yield from _paper_policies(work, known, steps, [name for name in methods if name in PAPER])


def _paper_policies(
    work: Workload, known: Profile, steps: int, methods: Sequence[str]
) -> Iterator[tuple[str, Policy]]:
    """The paper's parts on one schedule, searched and fitted on the network."""
    if not methods:
        return
    walk = make_walk(known, known.prompts, call=work.call, batch_size=work.batch_size)
    found = search_schedule(work.pipe, walk, known, budget=steps)
    for method in methods:
        yield method, make_policy(known, fit_paper_plan(work.pipe, walk, found, **PAPER[method]))


def _policy_entry(work: Workload, method: str, budget: float, policy: Policy) -> Entry:
    steps = len(policy.compute_steps)
    return Entry(method, budget, lambda: attach(work.pipe, policy), steps, f"{steps} steps")


def rival_entries(
    work: Workload, budgets: Sequence[float], rival: Baseline, journal: Journal
) -> Iterator[Entry]:
    """A rival, calibrated and turned to every budget; or the one entry that says why not."""
    why_not = rival.applies(work.pipe)
    if why_not is not None:
        yield from (Entry(rival.name, budget, None, why_not=why_not) for budget in budgets)
        return
    ready = rival.calibrate(work.pipe, work.learn)
    knob = ready.knob(work.pipe, num_inference_steps=work.steps)
    runs = work.calibration[: work.batch_size]  # as many as are judged: some decide per batch

    def count() -> int:
        return count_flops(work.pipe, lambda: work.run(runs, output_type="latent"))

    def turned(value: float) -> int:
        with ready.attach(work.pipe, value, num_inference_steps=work.steps):
            return count()

    full = journal.flops("full", 1.0, count)

    def ratio(value: float) -> float:
        return journal.flops(rival.name, value, lambda: turned(value)) / full

    for budget in budgets:
        value, _ = search_knob(knob, ratio, 1 / budget, tries=SEARCH_TRIES)
        yield Entry(
            rival.name,
            budget,
            _attacher(ready, work, value),
            compute_steps=int(value) if knob.name in ("steps", "computed steps") else None,
            knob=f"{knob.name} {value:.4g}",
        )


def _attacher(rival: Baseline, work: Workload, value: float) -> Attach:
    return lambda: rival.attach(work.pipe, value, num_inference_steps=work.steps)
