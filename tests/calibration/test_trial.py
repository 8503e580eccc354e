"""Trials with distances from a script: which fit is kept, error ratios, unit, frontier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.calibration import trial
from ertacache.calibration.reference import Latents, Reference, RunFacts
from ertacache.calibration.session import Generated, Session, number_runs
from ertacache.calibration.trial import (
    by_group,
    measure_fits,
    regret,
    rest_of,
    trial_budgets,
)
from ertacache.core.frontier import PLAIN, Frontier, MeasuredFit, solve_frontier
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.solve import PlanSolver, profile_frontier, profile_of, with_frontier
from tests.calibration.conftest import TINY_PROMPTS, TINY_RUNS, TINY_STEPS, tiny_call

START = 1e-2
FINEST = Groups(channels=4, bands=3)
BANDS, CHANNELS = Groups(bands=3), Groups(channels=4)
Distances = Callable[[int, Fit, bool], Sequence[float]]


class Grey(Session):
    """A session without a pipeline: grey results, a tenth darker under a plan."""

    def __init__(self) -> None:
        super().__init__(None, batch_size=2)  # type: ignore[arg-type]
        self.decoded: list[tuple[int, int | None]] = []

    def reference(self, runs: Sequence[ProfiledPrompt]) -> Reference:
        schedule: Any = None
        facts = RunFacts(schedule)
        return Reference(tuple(runs), Latents([None] * len(runs)), facts)

    def generate(
        self, runs: Sequence[ProfiledPrompt], policy: Policy | None = None, **more: Any
    ) -> Generated:
        assert more == {"phase": "trial"}
        steps = None if policy is None else len(policy.default.compute_steps)
        self.decoded.append((len(runs), steps))
        level = 0.5 if policy is None else 0.4
        return Generated(torch.full((len(runs), 3, 4, 4), level), 1.0, None)


Asked = tuple[int, Fit, bool]
"""Computed steps of a plan, its fit, and whether its schedule is uniform."""


@dataclass
class Script:
    """Plans that were asked for, and how far their results are from the full run.

    Attributes:
        distances: by computed steps, fit and whether the schedule is uniform; of every prompt.
        given: factor of them for a schedule that was given.
        asked: all plans whose schedules were searched or uniform, in order.
        followed: all plans whose schedules were given, and these.
        predicted: predicted errors of both kinds.
    """

    distances: Distances
    given: float = 1.0
    asked: list[Asked] = field(default_factory=list)
    followed: list[tuple[Asked, tuple[int, ...]]] = field(default_factory=list)
    predicted: list[tuple[Asked, float]] = field(default_factory=list)

    def solve(
        self,
        *args: Any,
        measured: Sequence[MeasuredFit],
        given: Sequence[tuple[int, ...]] = (),
        **more: Any,
    ) -> Frontier:
        (known,) = measured
        found = solve_frontier(*args, measured=measured, given=given, **more)
        asked = (int(known.computed), known.fit, known.uniform)
        if given:
            assert found.points[0].plan.compute_steps == given[0]
            self.followed.append((asked, given[0]))
        else:
            self.asked.append(asked)
        self.predicted.append((asked, found.point(asked[0]).predicted_error))
        self._factor = self.given if given else 1.0
        return found

    def run(self, session: Session, reference: Reference, plan: TrajectoryPlan, **_: Any) -> Tensor:
        (budget, fit, uniform), _ = self.predicted[-1]
        assert (len(plan.compute_steps), plan.groups) == (budget, fit.groups)
        found = torch.tensor(self.distances(budget, fit, uniform), dtype=torch.float64)
        return self._factor * found

    def ridges(self, budget: int) -> list[float]:
        """Ridges that were tried for a budget on searched schedules, as they are at first."""
        return [
            fit.ridge
            for computed, fit, uniform in self.asked
            if (computed, uniform, fit) == (budget, False, Fit(ridge=fit.ridge))
        ]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Distances], Script]:
    def make(distances: Distances) -> Script:
        script = Script(distances)
        monkeypatch.setattr(trial, "solve_frontier", script.solve)
        monkeypatch.setattr(trial, "run_plan", script.run)
        slopes = torch.full((TINY_STEPS,), 0.5, dtype=torch.float64)
        monkeypatch.setattr(trial, "_response", lambda *_: slopes)
        return script

    return make


def valley(best: float, *, uniform: float = 2.0) -> Distances:
    """Two prompts that are nearest with one of the ridges; the factor of uniform schedules.

    Higher orders, groups and the response are worse.
    """

    def distances(budget: int, fit: Fit, spread: bool) -> list[float]:
        error = 0.01 * (1 + abs(math.log10(fit.ridge / best))) * (uniform if spread else 1)
        error *= (1 + 9 * fit.order) * (1 if fit.groups == ONE_GROUP else 10)
        error *= 10 if fit.response else 1
        return [error, 4 * error]

    return distances


def test_the_first_ridge_is_kept_if_it_is_best(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    script = scripted(valley(START))
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    assert [fit.computed for fit in found.fits] == [2, 4, 5]  # 1.5x, 2x and 3x, ascending
    assert {fit.fit.ridge for fit in found.fits} == {START}
    assert not any(fit.uniform for fit in found.fits)
    assert script.ridges(5) == [1e-2, 1e-1, 1e-3]
    assert profile_of(tiny_known).finest == FINEST
    assert script.asked[3:11] == [
        (5, Fit(ridge=1e-2, response=True), False),  # then the response
        (5, Fit(ridge=1e-4, response=True), False),
        (5, Fit(ridge=1.0, order=1), False),  # then orders
        (5, Fit(ridge=1.0, order=2), False),
        (5, Fit(ridge=1e-2, groups=BANDS), False),  # then groups, few at first
        (5, Fit(ridge=1e-2, groups=CHANNELS), False),
        (5, Fit(ridge=1e-2, groups=FINEST), False),
        (5, Fit(ridge=1e-2), True),  # then the uniform schedule
    ]
    assert [fit for computed, fit, uniform in script.asked if (computed, uniform) == (4, True)] == [
        Fit(ridge=1e-2),
        Fit(ridge=PLAIN),  # plain reuse, and what else needs no calibration
        Fit(ridge=PLAIN, order=1),
        Fit(ridge=PLAIN, order=2),
    ]
    assert found.response == (0.5,) * TINY_STEPS


@pytest.mark.parametrize("best", [1e-4, 1.0])
def test_a_budget_begins_with_the_ridge_of_the_one_before(
    scripted: Callable[[Distances], Script], tiny_known: Policy, best: float
) -> None:
    script = scripted(valley(best))
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    assert {fit.fit.ridge for fit in found.fits} == {best}
    assert script.ridges(5)[0] == START
    for budget in (4, 2):
        assert script.ridges(budget)[0] == best
        assert len(script.ridges(budget)) <= 3


def test_orders_and_groups_are_measured_budget_by_budget(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    """Where they are better; the next budget begins with order 0 and one group again."""
    wanted = {
        5: Fit(ridge=START, groups=BANDS),
        4: Fit(ridge=1.0, order=2),
        2: Fit(ridge=1.0, order=1, groups=CHANNELS),
    }

    def distances(budget: int, fit: Fit, uniform: bool) -> list[float]:
        best = wanted[budget]
        error = 1.0 + abs(math.log10(fit.ridge / best.ridge)) + abs(fit.order - best.order)
        if best.groups != ONE_GROUP:
            error *= {best.groups: 0.5, FINEST: 0.51}.get(fit.groups, 1.0)
        elif fit.groups != ONE_GROUP:
            error *= 2
        return [error * (2 if uniform or fit.response else 1)] * 2

    script = scripted(distances)
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    assert {fit.computed: (fit.fit.order, fit.fit.groups) for fit in found.fits} == {
        budget: (fit.order, fit.groups) for budget, fit in wanted.items()
    }
    for budget in wanted:
        first = next(fit for computed, fit, _ in script.asked if computed == budget)
        assert (first.order, first.groups) == (0, ONE_GROUP)


def test_many_groups_have_to_be_better_than_few(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    """By 0.3 dB; and with groups a weaker ridge is tried."""
    errors = {ONE_GROUP: 1.0, BANDS: 0.8, CHANNELS: 0.78, FINEST: 0.7}
    for finest, expected in ((0.78, BANDS), (0.7, FINEST)):
        errors[FINEST] = finest

        def distances(budget: int, fit: Fit, uniform: bool) -> list[float]:
            weaker = 0.9 if fit.ridge < START and fit.groups != ONE_GROUP else 1.0
            worse = 1 + fit.order + uniform + fit.response
            return [errors[fit.groups] * weaker * worse] * 2

        scripted(distances)
        found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
        assert {fit.fit.groups for fit in found.fits} == {expected}
        assert {fit.fit.ridge for fit in found.fits} == {1e-3}


def test_without_statistics_by_group_none_are_tried(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    script = scripted(valley(START))
    profile = replace(profile_of(tiny_known), by_group=None)
    found = measure_fits(Grey(), replace(tiny_known, profile=profile), TINY_RUNS[:4])
    assert {fit.groups for _, fit, _ in script.asked} == {ONE_GROUP}
    assert {fit.fit for fit in found.fits} == {Fit(ridge=START)}


def test_each_budget_has_its_own(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    best = {5: 1e-4, 4: 1e-1, 2: 10.0}
    scripted(lambda budget, fit, uniform: valley(best[budget])(budget, fit, uniform))
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    assert {fit.computed: fit.fit.ridge for fit in found.fits} == best


def test_uniform_schedules_may_be_better(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    scripted(
        lambda budget, fit, uniform: valley(START, uniform=0.9 if budget == 4 else 1.1)(
            budget, fit, uniform
        )
    )
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    assert {fit.computed: fit.uniform for fit in found.fits} == {2: False, 4: True, 5: False}


def test_error_ratios_and_unit(scripted: Callable[[Distances], Script], tiny_known: Policy) -> None:
    """Distances of 0.01 and 0.04 are typically 0.02; a tenth darker is 20 dB."""
    script, session = scripted(valley(START)), Grey()
    found = measure_fits(session, tiny_known, TINY_RUNS[:4])
    for fit in found.fits:
        key = (int(fit.computed), Fit(ridge=START), False)
        *_, one, other = (error for asked, error in script.predicted if asked == key)
        predicted = math.sqrt(one * other)  # on one half, and with the halves exchanged
        assert fit.error_ratio == pytest.approx(0.02 / predicted, rel=1e-9)
    assert session.decoded == [(2, None), (2, 4)]  # the second half of the runs, the middle budget
    assert found.unit_psnr == pytest.approx(20 + 20 * math.log10(0.02), abs=1e-3)
    assert (found.profile, found.plans) == (tiny_known.profile, ())


@pytest.mark.parametrize("worse", [False, True])
def test_the_schedule_tried_is_kept_if_that_of_the_frontier_is_worse(
    scripted: Callable[[Distances], Script],
    tiny_known: Policy,
    monkeypatch: pytest.MonkeyPatch,
    worse: bool,
) -> None:
    """Here the frontier has other schedules than were tried: the last steps of the run."""
    script = scripted(valley(START))
    script.given = 1.5 if worse else 1.0
    tried = {}

    def late(n: int) -> tuple[int, ...]:
        return (0, *range(TINY_STEPS + 1 - n, TINY_STEPS))

    def solve(*args: Any, given: Sequence[tuple[int, ...]] = (), **more: Any) -> Frontier:
        found = script.solve(*args, given=given, **more)
        if not given:
            tried[script.asked[-1]] = found.point(script.asked[-1][0]).plan.compute_steps
        return found

    def late_steps(policy: Policy, *, given: Sequence[tuple[int, ...]] = ()) -> Frontier:
        schedules = given or [late(n) for n in range(2, TINY_STEPS + 1)]
        return profile_frontier(policy, given=schedules)

    monkeypatch.setattr(trial, "solve_frontier", solve)
    monkeypatch.setattr(trial, "profile_frontier", late_steps)
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    steps = {len(known.compute_steps): known.compute_steps for known in found.frontier}
    for n in (2, 4, 5):
        ours, other = tried[(n, Fit(ridge=START), False)], late(n)
        assert ours != other
        assert steps[n] == (ours if worse else other)
    assert [steps[n] for n in (3, 6, 7)] == [late(n) for n in (3, 6, 7)]
    ran = [schedule for _, schedule in script.followed]
    assert ran.count(steps[4]) == (1 if worse else 2)  # with the halves exchanged; on both halves
    profile, errors = profile_of(found), dict[int, float]()
    for fit in found.fits:
        (point,) = profile_frontier(found, given=[steps[int(fit.computed)]]).points
        errors[point.computed] = point.predicted_error
    assert PlanSolver(found).curve(profile.schedule)[2] == pytest.approx(errors[2], rel=1e-9)


def test_plans_are_run_on_other_prompts_than_they_are_fitted_on(
    scripted: Callable[[Distances], Script],
    tiny_known: Policy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = scripted(valley(START))
    known = profile_of(tiny_known)
    fitted: list[Tensor] = []
    ran: list[tuple[ProfiledPrompt, ...]] = []

    def solve(gram: Any, *args: Any, **more: Any) -> Frontier:
        fitted.append(gram.products)
        return script.solve(gram, *args, **more)

    def run(session: Session, reference: Reference, plan: TrajectoryPlan, **more: Any) -> Tensor:
        ran.append(reference.runs)
        return torch.full((len(reference.runs),), 0.01, dtype=torch.float64)

    monkeypatch.setattr(trial, "solve_frontier", solve)
    monkeypatch.setattr(trial, "run_plan", run)
    for runs, halves in ((TINY_RUNS, ([1, 3], [0, 2, 4])), (TINY_RUNS[:2], ([1], [0]))):
        fitted, ran = [], []
        measure_fits(Grey(), tiny_known, runs)
        held = [tuple(TINY_RUNS[k] for k in half) for half in halves]
        assert [ran.count(half) for half in held] == [len(ran) - 3, 3]  # exchanged for each budget
        for products, half in zip(fitted, map(held.index, ran), strict=True):
            rest = [TINY_RUNS[k] for k in range(5) if k not in halves[half]]
            assert torch.equal(products, known.select(rest).run_grams().products)


def test_the_rest_of_a_profile_are_whole_folds(tiny_known: Policy) -> None:
    """Others than those of the runs, so that it has groups; with one fold, all other runs."""
    known = replace(profile_of(tiny_known), folds=(0, 1, 1, 2, 2), by_group=None)
    first, *more = TINY_RUNS
    assert rest_of(known, [first]).runs == tuple(more)
    assert rest_of(known, TINY_RUNS[1:2]).runs == (first, *more[2:])  # the other one of its fold
    assert rest_of(replace(known, folds=(3,) * 5), TINY_RUNS[3:]).runs == tuple(TINY_RUNS[:3])
    assert rest_of(profile_of(tiny_known), TINY_RUNS[:2]).finest == FINEST


def test_the_worst_kind_of_run_decides(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    """A stronger ridge costs the two runs of low guidance half as much again, and halves the third.

    A mean over all of them would keep the weaker one: 1 x 1 x 8 is less than 1.5 x 1.5 x 4.
    """
    runs = number_runs(TINY_PROMPTS, varied={"guidance_scale": [2.0, 2.0, 2.0, 2.0, 9.0]})
    folds = (0, 0, 1, 1, 1)
    profile = replace(profile_of(tiny_known), runs=tuple(runs), folds=folds, by_group=None)

    def distances(budget: int, fit: Fit, uniform: bool) -> list[float]:
        low, high = {1e-2: (1.0, 8.0), 1e-1: (1.5, 4.0)}.get(fit.ridge, (9.0, 9.0))
        return [9.0] * 3 if uniform or fit.response else [low, low, high]

    scripted(distances)
    found = measure_fits(Grey(), replace(tiny_known, profile=profile), runs)
    assert {fit.fit.ridge for fit in found.fits} == {1e-1}


def test_one_run_or_a_short_one_is_not_tried(
    scripted: Callable[[Distances], Script], tiny_known: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripted(valley(START))
    bare = with_frontier(tiny_known)
    assert measure_fits(Grey(), tiny_known, TINY_RUNS[:1]).frontier == bare.frontier
    monkeypatch.setattr(trial, "trial_budgets", lambda profile: [])
    found = measure_fits(Grey(), tiny_known, TINY_RUNS)
    assert (found.frontier, found.fits) == (bare.frontier, ())
    assert script.asked == []


def test_budgets_of_trials() -> None:
    def budgets(num_steps: int, experts: tuple[int, ...] = ()) -> list[int]:
        profile: Any = SimpleNamespace(num_steps=num_steps, expert_steps=experts)
        return trial_budgets(profile)

    assert budgets(50) == [33, 25, 16, 10]
    assert budgets(TINY_STEPS) == [5, 4, 2]
    assert budgets(TINY_STEPS, experts=(3,)) == [5, 4]
    assert budgets(3) == [2]
    assert budgets(2) == []
    assert budgets(1) == []


def test_regret_by_hand() -> None:
    assert regret([[1.0, 2.0]]) == [1.0]
    assert regret([[1.0, 8.0], [1.5, 4.0]]) == [2.0, 1.5]
    assert regret([[3.0], [2.0], [8.0]]) == [1.5, 1.0, 4.0]
    found = regret([[0.0, 1.0], [1.0, 1.0]])  # a perfect run cannot be divided by
    assert found[0] == 1.0
    assert found[1] > 1e6


def test_distances_by_kind_of_run() -> None:
    runs = number_runs(TINY_PROMPTS[:4], varied={"guidance_scale": [2.0, 5.0]})
    found = by_group(runs, torch.tensor([1.0, 3.0, 1.0, 3.0]))
    assert found == pytest.approx([1.0, 3.0])


@pytest.fixture(scope="module")
def steep() -> tuple[MeasuredFit, ...]:
    """Measured errors that grow with the number of computed steps, against all sense."""
    ridges = {2: 1e-2, 4: 1e-1, 6: 1e-3}
    return tuple(
        MeasuredFit(n, Fit(ridge=ridge), error_ratio=10.0 ** (n - 2)) for n, ridge in ridges.items()
    )


@pytest.mark.parametrize("measured", [False, True])
def test_the_frontier_never_rises(
    tiny_known: Policy, steep: tuple[MeasuredFit, ...], measured: bool
) -> None:
    policy = with_frontier(replace(tiny_known, fits=steep if measured else ()))
    sizes = [len(known.compute_steps) for known in policy.frontier]
    errors = [known.predicted_error for known in policy.frontier]
    assert sizes == list(range(2, TINY_STEPS + 1))
    assert errors == sorted(errors, reverse=True)
    assert (errors[0] == errors[1]) == measured  # three would be ten times as bad as two
    curve = PlanSolver(policy).curve(profile_of(policy).schedule)
    assert curve == dict(zip(sizes, errors, strict=True))
    assert policy.fits == (steep if measured else ())


def test_the_response_is_kept_from_budget_to_budget(
    scripted: Callable[[Distances], Script], tiny_known: Policy
) -> None:
    """Where it is better with a weak ridge; at two computed steps it is not."""

    def distances(budget: int, fit: Fit, uniform: bool) -> list[float]:
        wanted = fit.response == (budget > 2)
        error = valley(1e-4 if fit.response else START)(
            budget, replace(fit, response=False), uniform
        )
        return [e if wanted else 5 * e for e in error]

    script = scripted(distances)
    found = measure_fits(Grey(), tiny_known, TINY_RUNS[:4])
    assert {fit.computed: (fit.fit.response, fit.fit.ridge) for fit in found.fits} == {
        5: (True, 1e-4),
        4: (True, 1e-4),
        2: (False, START),
    }
    firsts = {n: next(fit for m, fit, _ in script.asked if m == n) for n in (5, 4, 2)}
    assert firsts == {
        5: Fit(ridge=START),
        4: Fit(ridge=1e-4, response=True),
        2: Fit(ridge=1e-4, response=True),
    }


def test_the_response_is_measured_with_plain_reuse(tiny: Any, tiny_known: Policy) -> None:
    session = Session(tiny, tiny_call(), batch_size=2)
    found = trial._response(session, tiny_known, session.reference(TINY_RUNS[:3]))
    again = trial._response(session, tiny_known, session.reference(TINY_RUNS[:3]))
    assert found.shape == (TINY_STEPS,)
    assert torch.equal(found, again)
    assert bool((found != 0).all())
    assert bool(found.isfinite().all())
    assert session.evaluations.trial == 2 * 3 * TINY_STEPS  # every step of every prompt


def test_what_follows_plain_reuse_begins_with_a_ridge_that_there_is() -> None:
    plain = Fit(ridge=PLAIN)
    assert trial._next_start(Fit(ridge=trial.FIRST), plain) == Fit(ridge=max(trial.RIDGES))
