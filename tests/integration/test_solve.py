"""Plans solved from a profile for any run, on flows that are known in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import rmse, shifted_sigmas
from ertacache.core.frontier import PLAIN, MeasuredFit, leave_out_errors, solve_frontier
from ertacache.core.gram import RunStatistics, Schedule, profile_run, resample
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.sampler import Euler, SolverFactory, run, run_reference
from ertacache.core.search import spread_schedule
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import TrajectoryStepper
from ertacache.formats.fingerprint import Fingerprint, hash_config
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.solve import (
    PlanSolver,
    error_of,
    guess_unit,
    measured_unit,
    predicted_psnr,
    profile_frontier,
)
from tests.core.rings import bench, plain_plan
from tests.core.solvers import AdamsBashforth, schedule_of
from tests.integration.rings import RingSampling, with_frontier
from tests.integration.sampling import make

FACTS = Fingerprint(
    pipeline="Ring",
    denoiser="Ring",
    denoiser_hash=hash_config({}),
    prediction="flow",
    scheduler="Euler",
    scheduler_config={},
    guidance={},
    dtype="float64",
    latent_shape=(64, 2),
    versions={},
)
FITS = (MeasuredFit(5, Fit(ridge=1e-2), 1.5), MeasuredFit(12, Fit(), 0.8))
STEPS = 20


def policy_of(
    statistics: RunStatistics, schedule: Schedule, *, experts: Sequence[int] = (), **parts: Any
) -> Policy:
    runs = tuple(ProfiledPrompt("", seed) for seed in range(statistics.num_prompts))
    return Policy(FACTS, profile=Profile(schedule, statistics, runs, tuple(experts)), **parts)


@cache
def ring(fits: tuple[MeasuredFit, ...] = (), experts: tuple[int, ...] = ()) -> Policy:
    """The profile of 20 steps, with its frontier."""
    flow = bench(2.0, 0.3, STEPS, 3.0)
    schedule = schedule_of(flow.sigmas)
    return with_frontier(policy_of(flow.statistics, schedule, experts=experts, fits=fits))


def profile_of(policy: Policy) -> Profile:
    assert policy.profile is not None
    return policy.profile


@pytest.mark.parametrize(("fits", "kept"), [((), True), (FITS, False), (FITS, True)])
def test_a_budget_on_the_profiled_schedule_is_its_point_of_the_frontier(
    fits: tuple[MeasuredFit, ...], kept: bool
) -> None:
    """Whether the file has the frontier or it is searched when it is needed."""
    policy = ring(fits) if kept else replace(ring(fits), frontier=())
    solver, frontier = PlanSolver(policy), profile_frontier(policy)
    schedule = schedule_of(shifted_sigmas(STEPS))
    for budget in (2, 5, 10, STEPS):
        found, point = solver.solve(schedule, budget), frontier.point(budget)
        assert found is not None
        assert isinstance(found.plan, TrajectoryPlan)
        assert found.compute_steps == point.plan.compute_steps
        assert torch.equal(found.plan.coefficients, point.plan.coefficients)
        # Its own error; that of the frontier never rises with the number of computed steps.
        assert found.predicted_error is not None
        assert found.predicted_error == pytest.approx(point.predicted_error, rel=1e-6)
        assert found.fits(schedule)


OTHERS = {
    "fewer steps": (14, 3.0, Euler),
    "more steps": (28, 3.0, Euler),
    "another shift": (STEPS, 1.5, Euler),
    "another scheduler": (16, 5.0, AdamsBashforth),
}


@pytest.fixture(params=list(OTHERS))
def other(request: pytest.FixtureRequest) -> tuple[Schedule, SolverFactory]:
    num_steps, shift, solver = OTHERS[request.param]
    return schedule_of(shifted_sigmas(num_steps, shift), solver=solver), solver


@pytest.mark.parametrize("fits", [(), FITS], ids=["left out", "measured"])
def test_a_budget_elsewhere_is_as_good_as_its_point_of_a_whole_frontier(
    other: tuple[Schedule, SolverFactory], fits: tuple[MeasuredFit, ...]
) -> None:
    """Searches end in different places: each within a factor of 2, all together of 1.2."""
    schedule, policy = other[0], ring(fits)
    profile, solver = profile_of(policy), PlanSolver(policy)
    gram = resample(profile.statistics.gram, profile.schedule, schedule)
    whole = solve_frontier(gram, schedule.nominal, measured=solver.fits(schedule))
    ratios = []
    for budget in range(schedule.num_steps // 5, schedule.num_steps // 2 + 1, 2):
        found = solver.solve(schedule, budget)
        assert found is not None
        assert found.predicted_error is not None
        ratios.append(found.predicted_error / whole.point(budget).predicted_error)
    assert max(ratios) < 2
    assert math.prod(ratios) ** (1 / len(ratios)) < 1.2


def measured_error(
    plan: Any, schedule: Schedule, solver: SolverFactory, *, first: int = 0
) -> float:
    """On noise that was not profiled, against the full run of the solver."""
    flow, sigmas = bench(2.0, 0.3, STEPS, 3.0), schedule.sigmas
    full = run_reference(flow.flow.velocity, flow.heldout, sigmas=sigmas, solver=solver)
    start, target = full.latents[first], full.latents[-1]
    latents = run(flow.flow.velocity, start, TrajectoryStepper(plan), sigmas=sigmas[first:])
    return rmse(latents[-1], target)


def test_a_plan_for_another_run_is_as_good_as_from_its_own_profile(
    other: tuple[Schedule, SolverFactory],
) -> None:
    schedule, solver = other
    flow, budget = bench(2.0, 0.3, STEPS, 3.0), schedule.num_steps // 2
    full = run_reference(
        flow.flow.velocity, flow.reference.latents[0], sigmas=schedule.sigmas, solver=solver
    )
    own = solve_frontier(profile_run(full).gram, schedule.nominal, budgets=[budget]).points[0]
    found = PlanSolver(ring()).solve(schedule, budget)
    assert found is not None
    error = measured_error(found.plan, schedule, solver)
    assert error < 5 * measured_error(own.plan, schedule, solver)
    uniform = spread_schedule(schedule.num_steps, budget, {0})
    assert error < measured_error(plain_plan(schedule.sigmas, uniform), schedule, solver) / 4


@pytest.mark.parametrize("first", [1, 6, 12])
def test_a_run_that_begins_later(first: int) -> None:
    sigmas = shifted_sigmas(STEPS)
    schedule = schedule_of(sigmas[first:], begun=False)
    budget = math.ceil((STEPS - first) / 2)
    found = PlanSolver(ring()).solve(schedule, budget)
    assert found is not None
    assert (found.num_steps, len(found.compute_steps)) == (STEPS - first, budget)
    steps = spread_schedule(STEPS - first, budget, {0})
    assert found.compute_steps == steps  # data of the user's is unknown to the profile
    errors = [
        measured_error(plan, schedule_of(sigmas), Euler, first=first)
        for plan in (found.plan, plain_plan(sigmas[first:], steps))
    ]
    assert errors[0] < errors[1] / 2
    curve = PlanSolver(ring()).curve(schedule)
    assert list(curve) == list(range(2, STEPS - first + 1))
    assert list(curve.values()) == sorted(curve.values(), reverse=True)
    assert curve[STEPS - first] == 0.0
    assert found.predicted_error == pytest.approx(curve[budget])


def test_a_profile_of_runs_that_begin_later_serves_them_as_any_other() -> None:
    policy = ring()
    mine = replace(profile_of(policy).schedule, begun=False)
    own = replace(policy, profile=replace(profile_of(policy), schedule=mine), frontier=())
    found = PlanSolver(own).solve(mine, STEPS // 2)
    assert found is not None
    assert found.compute_steps != spread_schedule(STEPS, STEPS // 2, {0})


def switches(sigmas: Tensor, boundary: float) -> list[int]:
    """The step at which a network for less noise takes over, if one does within the run."""
    return (sigmas[:-1] < boundary).nonzero().flatten().tolist()[:1]


@pytest.mark.parametrize("experts", [(8,), (3, 8, 9), (STEPS - 1,)])
@pytest.mark.parametrize("num_steps", [7, STEPS, 60])
def test_every_step_at_which_another_network_may_take_over_is_computed(
    experts: tuple[int, ...], num_steps: int
) -> None:
    """The boundaries lie somewhere between the noise levels of two profiled steps."""
    own, flow = shifted_sigmas(STEPS), bench(2.0, 0.3, STEPS, 3.0)
    solver = PlanSolver(policy_of(flow.statistics, schedule_of(own), experts=experts))
    schedule = schedule_of(shifted_sigmas(num_steps, 2.0))
    possible = {0}
    for k in experts:
        for boundary in torch.linspace(own[k], own[k - 1], 1000).double()[1:-1].tolist():
            possible.update(switches(schedule.sigmas, boundary))
    assert solver.pinned(schedule) == possible
    assert solver.budgets(schedule)[0] == max(2, len(possible))
    assert solver.pinned(schedule_of(own)) == {0, *experts}


def test_plans_elsewhere_compute_the_first_steps_of_every_network() -> None:
    solver = PlanSolver(ring(experts=(8,)))
    for schedule in (schedule_of(shifted_sigmas(28)), schedule_of(shifted_sigmas(11, 1.5))):
        for budget in (4, 6):
            found = solver.solve(schedule, budget)
            assert found is not None
            assert solver.pinned(schedule) <= set(found.compute_steps)
        assert list(solver.curve(schedule)) == list(solver.budgets(schedule))


def wandering(prompts: int, seed: int) -> tuple[RunStatistics, Schedule]:
    """Outputs that are random walks: what was fitted on some prompts is wrong for others."""
    generator = torch.Generator().manual_seed(seed)
    walk = torch.randn(11, prompts, 2, generator=generator, dtype=torch.float64).cumsum(0)
    steps, sigmas = iter(range(10)), shifted_sigmas(10)
    full = run_reference(lambda x, sigma: walk[next(steps)], walk[10], sigmas=sigmas)
    return profile_run(full), schedule_of(sigmas)


RATIO = 0.8


def test_the_ridge_is_raised_until_plain_reuse_is_beaten_or_there_is_no_plan() -> None:
    statistics, schedule = wandering(2, seed=2)
    weak = MeasuredFit(4, Fit(ridge=1e-3), RATIO)
    solver = PlanSolver(policy_of(statistics, schedule, fits=(weak,)))
    elsewhere = schedule_of(shifted_sigmas(10, 3.01))
    facts, outcomes = solver._run(elsewhere), set()
    gram, nominal = facts.gram, elsewhere.nominal
    for budget in range(2, 10):
        steps = solver._point(facts, budget).plan.compute_steps
        ridges = [1e-3 * 10**power for power in range(10)]
        errors = [error_of_fit(gram, nominal, steps, Fit(ridge=ridge)) for ridge in ridges]
        uniform = spread_schedule(10, budget, {0})
        plain = error_of_fit(gram, nominal, uniform, Fit(ridge=PLAIN))
        better = [place for place, error in enumerate(errors) if error < plain]
        found = solver.solve(elsewhere, budget)
        if not better:
            assert found is None
            outcomes.add("none")
            continue
        outcomes.add("raised" if better[0] else "as measured")
        assert found is not None
        assert isinstance(found.plan, TrajectoryPlan)
        fit = Fit(ridge=ridges[better[0]])
        (plan,) = fit_plans(gram, nominal, schedules=[steps], fit=fit)
        torch.testing.assert_close(found.plan.coefficients, plan.coefficients)
        assert found.predicted_error == pytest.approx(RATIO * errors[better[0]])
    assert outcomes == {"none", "raised", "as measured"}


def test_what_trials_measured_on_the_profiled_schedule_is_kept() -> None:
    """However bad the simulation is: they ran plain reuse as well."""
    statistics, schedule = wandering(2, seed=2)
    weak = MeasuredFit(4, Fit(ridge=1e-3), RATIO)
    solver = PlanSolver(policy_of(statistics, schedule, fits=(weak,)))
    for budget in range(2, 10):
        found = solver.solve(schedule, budget)
        assert found is not None
        point = profile_frontier(solver.policy).point(budget)
        torch.testing.assert_close(found.plan.coefficients, point.plan.coefficients)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_plain_reuse_that_was_measured_to_be_best_is_a_plan(order: int) -> None:
    """On other schedules too, where the simulation sees no gain."""
    statistics, schedule = wandering(2, seed=2)
    known = MeasuredFit(4, Fit(ridge=PLAIN, order=order), RATIO, uniform=True)
    solver = PlanSolver(policy_of(statistics, schedule, fits=(known,)))
    for chosen in (schedule, schedule_of(shifted_sigmas(10, 3.01))):
        found = solver.solve(chosen, 4)
        assert found is not None
        assert found.compute_steps == spread_schedule(10, 4, {0})
        assert isinstance(found.plan, TrajectoryPlan)
        update = found.plan.coefficients[:, 0]
        assert torch.allclose(update[:, :2], chosen.nominal, rtol=0, atol=1e-4) == (order == 0)


def error_of_fit(gram: Any, nominal: Tensor, steps: Sequence[int], fit: Fit) -> float:
    return leave_out_errors(gram, nominal, schedules=[steps], fit=fit).item()


def test_the_curve_never_rises(other: tuple[Schedule, SolverFactory]) -> None:
    """And what is solved for one budget is not far from it."""
    schedule, solver = other[0], PlanSolver(ring(FITS))
    curve = solver.curve(schedule)
    assert list(curve) == list(range(2, schedule.num_steps + 1))
    errors = list(curve.values())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 20
    for budget in (schedule.num_steps // 3, schedule.num_steps // 2):
        found = solver.solve(schedule, budget)
        assert found is not None
        assert found.predicted_error is not None
        assert 0.4 < found.predicted_error / curve[budget] < 2.5


def test_the_curve_of_the_profiled_schedule_is_the_frontier() -> None:
    policy = ring(FITS)
    curve = PlanSolver(policy).curve(schedule_of(shifted_sigmas(STEPS)))
    points = profile_frontier(policy).points
    assert curve == {point.computed: point.predicted_error for point in points}


@pytest.mark.parametrize(
    ("num_steps", "first", "factor"),
    [(STEPS, 0, 1.0), (5, 0, 0.5), (80, 0, 2.0), (STEPS, 15, 0.25), (80, 60, 0.5)],
)
def test_what_was_measured_counts_by_noise_and_by_share(
    num_steps: int, first: int, factor: float
) -> None:
    """Of a run that begins after 15 of 20 profiled steps, a quarter of each number is left."""
    schedule = schedule_of(shifted_sigmas(num_steps)[first:], begun=first == 0)
    found = PlanSolver(ring(FITS)).fits(schedule)
    assert [each.computed for each in found] == pytest.approx([5 * factor, 12 * factor])
    for each, measured in zip(found, FITS, strict=True):
        assert replace(each, computed=measured.computed) == measured


def test_plain_reuse_as_a_plan() -> None:
    """Evenly spaced but for the steps of experts, and the scheduler's own update."""
    solver = PlanSolver(ring(experts=(8,)))
    for schedule in (schedule_of(shifted_sigmas(STEPS)), schedule_of(shifted_sigmas(11, 1.5))):
        found, pinned = solver.plain(schedule, 5), solver.pinned(schedule)
        assert found.compute_steps == spread_schedule(schedule.num_steps, 5, pinned)
        assert isinstance(found.plan, TrajectoryPlan)
        update = found.plan.coefficients[:, 0]
        torch.testing.assert_close(update[:, :2], schedule.nominal, rtol=0, atol=1e-5)
        assert update[:, 2:].abs().max() < 1e-5
        assert found.fits(schedule)


def test_psnr_by_the_measured_unit_or_a_guess() -> None:
    """An error of a tenth of the latents' spread is 20 dB below a quarter of the pixels' range."""
    policy = ring()
    spread = profile_of(policy).statistics.final_spread
    guessed = PlanSolver(policy).psnr(0.1 * spread)
    assert guessed == pytest.approx(20 + 20 * math.log10(4))
    assert guessed == predicted_psnr(0.1 * spread, guess_unit(profile_of(policy)))
    measured = PlanSolver(replace(policy, unit_psnr=12.0))
    assert measured.psnr(0.01) == pytest.approx(52.0)
    assert error_of(52.0, 12.0) == pytest.approx(0.01)
    assert measured_unit(52.0, 0.01) == pytest.approx(12.0)
    assert math.isfinite(measured.psnr(0.0))


def test_a_policy_without_a_profile_has_nothing_to_solve_from() -> None:
    policy = ring()
    found = PlanSolver(policy).solve(profile_of(policy).schedule, 8)
    assert found is not None
    with pytest.raises(PolicyError, match="has no profile, so that nothing can be solved from it"):
        PlanSolver(Policy(FACTS, plans=(found,)))


def test_schedules_are_searched_under_both_models_of_errors() -> None:
    """Whichever of them plans are solved with; without a measured response there is one."""
    sampling = RingSampling(make("FlowMatchEulerDiscreteScheduler"))
    policy = sampling.policy(profile=sampling.profile())
    schedule, fit = profile_of(policy).schedule, MeasuredFit(4, Fit(ridge=1e-2), 1.0)
    (alone,) = PlanSolver(replace(policy, fits=(fit,))).searched(schedule, 4)
    response = tuple(20.0 - k for k in range(schedule.num_steps))
    found = []
    for given in (False, True):
        fits = (replace(fit, fit=replace(fit.fit, response=given), uniform=True),)
        solver = PlanSolver(replace(policy, fits=fits, response=response))
        found.append(solver.searched(schedule, 4))
    assert found[0] == found[1]
    assert found[0][0] == alone
    assert found[0][1] != alone
    assert all(len(steps) == 4 for steps in found[0])
