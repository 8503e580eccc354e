"""Compute schedules simulated without the network: against runs, by hand, by explicit vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ertacache.core.flows import rmse, shifted_sigmas
from ertacache.core.gram import Gram, Trajectory, profile_run
from ertacache.core.groups import Groups
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.sampler import run, run_reference
from ertacache.core.simulate import (
    Fit,
    Floats,
    System,
    fit_plans,
    prior_weights,
    schedule_mask,
    solve_ridge,
)
from ertacache.core.steppers import TrajectoryStepper
from tests.core.rings import Bench, plain_plan, predicted_errors, refitted
from tests.core.solvers import euler_update

SIGMAS = shifted_sigmas(12)
NOMINAL = euler_update(SIGMAS)
STEPS = (0, 2, 5, 6, 10)


def blind(x: Tensor, sigma: Tensor) -> Tensor:
    """A network that depends on sigma alone: then simulation is exact."""
    waves = torch.arange(1, 9, dtype=torch.float64) * sigma
    return (torch.sin(3 * waves) + 2 * torch.cos(waves * waves)).expand_as(x)


def noise(prompts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(prompts, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("history", [1, 3])
def test_predicted_errors_are_the_measured_ones(history: int) -> None:
    reference = run_reference(blind, noise(3), sigmas=SIGMAS)
    gram = profile_run(reference).gram
    fit = Fit(history=history, sensitivity=0.0)
    (plan,) = fit_plans(gram, NOMINAL, schedules=[STEPS], fit=fit)
    latents = run(blind, noise(3), TrajectoryStepper(plan), sigmas=SIGMAS)
    predicted = predicted_errors(gram, NOMINAL, plan=plan, sensitivity=0.0)
    for p in range(3):
        measured = [rmse(x[p], y[p]) for x, y in zip(latents, reference.latents, strict=True)]
        assert predicted[p].tolist() == pytest.approx(measured, abs=2e-7)
    assert predicted[:, -1].max() > 1e-3  # the schedule does lose something


def test_every_step_lands_nearest_to_the_reference() -> None:
    reference = run_reference(blind, noise(2), sigmas=SIGMAS)
    gram = profile_run(reference).gram
    fit = Fit(history=2, ridge=0.0, sensitivity=0.0)
    (plan,) = fit_plans(gram, NOMINAL, schedules=[STEPS], fit=fit)
    best = predicted_errors(gram, NOMINAL, plan=plan, sensitivity=0.0).square().mean(0)
    for step in (3, 4, 10):
        for shift in (-1e-3, 1e-3):
            z = plan.coefficients.clone()
            z[step, 0, 1] += shift
            other = TrajectoryPlan(plan.compute_steps, z)
            errors = predicted_errors(gram, NOMINAL, plan=other, sensitivity=0.0)
            assert errors.square().mean(0)[step + 1] > best[step + 1]


def test_a_strong_ridge_is_plain_reuse(mild: Bench) -> None:
    steps = (0, 4, 9, 20, 29)
    (plan,) = fit_plans(mild.gram, mild.nominal, schedules=[steps], fit=Fit(ridge=1e9))
    plain = plain_plan(mild.sigmas, steps)
    assert torch.allclose(plan.coefficients[..., :2], plain.coefficients, atol=1e-7)
    assert plan.coefficients[..., 2:].abs().max() < 1e-7
    assert torch.equal(plan.coefficients[..., 0], plain.coefficients[..., 0])


def test_all_steps_computed_is_the_full_run(mild: Bench) -> None:
    (plan,) = fit_plans(mild.gram, mild.nominal, schedules=[range(30)], fit=Fit())
    assert mild.error(plan) < 1e-7


def test_schedules_do_not_disturb_each_other(mild: Bench) -> None:
    schedules = [(0, 4, 9, 20), (0, 1, 2, 29), tuple(range(0, 30, 2))]
    together = fit_plans(mild.gram, mild.nominal, schedules=schedules, fit=Fit())
    for schedule, plan in zip(schedules, together, strict=True):
        (alone,) = fit_plans(mild.gram, mild.nominal, schedules=[schedule], fit=Fit())
        assert torch.allclose(plan.coefficients, alone.coefficients, atol=1e-9)
        assert plan.compute_steps == schedule


def test_history_holds_only_what_was_computed(mild: Bench) -> None:
    (plan,) = fit_plans(mild.gram, mild.nominal, schedules=[(0, 3, 9)], fit=Fit(history=4))
    given = (plan.coefficients[:, 0, 1:] != 0).sum(1).tolist()
    assert given == [1] * 3 + [2] * 6 + [3] * 21


@pytest.mark.parametrize("history", [1, 2, 4])
@pytest.mark.parametrize("sensitivity", [0.5, 3.0])
def test_the_derivation_holds_for_explicit_disturbances(history: int, sensitivity: float) -> None:
    """Disturbances as real vectors, each in a dimension of its own, so that none correlate.

    Then expectations are plain inner products: the refit on these vectors must find the simulated
    coefficients, and its latents the simulated errors.
    """
    T, N = 12, 8 + 12
    start = torch.nn.functional.pad(noise(1), (0, T))

    def still(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.nn.functional.pad(blind(x[:, :8], sigma), (0, T))

    full = run_reference(still, start, sigmas=SIGMAS)
    gram, steps = profile_run(full).gram, (0, 2, 3, 5, 6, 8, 10)
    rate = sensitivity**2 * gram.output_rate()[0]

    def disturbed(x: Tensor, sigma: Tensor) -> Tensor:
        k = int((sigma == SIGMAS).nonzero())
        v = still(x, sigma)
        error = (x - full.latents[k]).square().mean()
        v[0, 8 + k] = (N * rate[k] * error).sqrt()  # |n|^2 = rate * error, as a mean over N
        return v

    fit = Fit(history=history, ridge=1e-3, sensitivity=sensitivity)
    system, mask = System(gram, NOMINAL, fit), schedule_mask([steps], T)
    simulation = system.simulate(mask, torch.zeros(1, dtype=torch.long))
    plan = refitted(
        disturbed, full.latents, sigmas=SIGMAS, compute_steps=steps, nominal=NOMINAL, fit=fit
    )
    torch.testing.assert_close(plan.coefficients, simulation.coefficients[0], rtol=1e-6, atol=1e-9)
    latents = run(disturbed, start, TrajectoryStepper(plan), sigmas=SIGMAS)
    measured = [rmse(x, y) for x, y in zip(latents, full.latents, strict=True)]
    assert simulation.errors[0].tolist() == pytest.approx(measured, rel=1e-6, abs=2e-7)
    assert rmse(latents[-1][:, 8:], full.latents[-1][:, 8:]) > 1e-3  # disturbances do matter


def test_sensitivity_by_hand() -> None:
    """One element, one prompt: an output computed at a latent that is off by e is off by L e."""
    x = [torch.tensor([[value]]).double() for value in (4.0, 3.0, 1.0)]
    v = [torch.tensor([[value]]).double() for value in (-1.0, -2.0)]
    gram = profile_run(Trajectory(tuple(x), tuple(v))).gram
    nominal = torch.ones(2, 2).double()
    z = torch.ones(2, 1, 3).double()
    z[..., 2] = 0
    z[0, 0, 1] = 0.5  # the first step covers half of its interval: e = 0.5
    plan = TrajectoryPlan((0, 1), z)
    still = predicted_errors(gram, nominal, plan=plan, sensitivity=0.0)[0].tolist()
    assert still == pytest.approx([0.0, 0.5, 0.5])
    # L = |v_1 - v_0| / |x_1 - x_0| = 1: the second output brings 0.5 more, independently.
    moved = predicted_errors(gram, nominal, plan=plan, sensitivity=1.0)[0].tolist()
    assert moved == pytest.approx([0.0, 0.5, (0.25 + 0.25) ** 0.5])


def test_weights_of_the_polynomial_by_hand() -> None:
    past = np.array([[4, 2, 0], [4, 2, -1], [4, -1, -1], [6, 3, 2]])
    assert prior_weights(past, 6, order=0).tolist() == [[1.0, 0.0, 0.0]] * 4
    # A line through steps 4 and 2 goes on to 6; with one output there is no line.
    line = prior_weights(past, 6, order=1)
    assert line.tolist() == [[2.0, -1.0, 0.0], [2.0, -1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    # The parabola through 4, 2 and 0: third differences of equal steps.
    curve = prior_weights(past, 6, order=2)
    assert curve[0].tolist() == [3.0, -3.0, 1.0]
    assert np.array_equal(curve[1:], line[1:])  # too few outputs, or the step itself is computed


@pytest.mark.parametrize("order", [0, 1, 2])
def test_polynomials_are_extrapolated_exactly(order: int) -> None:
    past = np.array([[11, 9, 4, 2], [7, 6, 5, 0], [12, 3, 1, 0]])
    weights = prior_weights(past, 12, order=order)
    for power in range(order + 1):
        values = (weights * past.astype(float) ** power).sum(1)
        np.testing.assert_allclose(values, 12.0**power, rtol=1e-12)
    assert (weights[:, order + 1 :] == 0).all()
    short = prior_weights(past[:, :1], 12, order=order)  # a history shorter than the polynomial
    assert short.tolist() == [[1.0]] * 3


@pytest.mark.parametrize("order", [1, 2])
def test_a_strong_ridge_is_the_polynomial_through_the_newest_outputs(
    mild: Bench, order: int
) -> None:
    """Interpolated by solving for its coefficients, not by Lagrange's formula."""
    steps = (0, 4, 9, 20, 29)
    fit = Fit(ridge=1e9, order=order)
    (plan,) = fit_plans(mild.gram, mild.nominal, schedules=[steps], fit=fit)
    for k in range(30):
        past = [step for step in reversed(steps) if step <= k][: order + 1]
        powers = torch.arange(len(past), dtype=torch.float64)
        nodes = torch.tensor(past, dtype=torch.float64)[:, None] ** powers
        weights = torch.linalg.solve(nodes.mT, float(k) ** powers)
        expected = torch.zeros(5, dtype=torch.float64)
        expected[0] = mild.nominal[k, 0]
        expected[1 : 1 + len(past)] = mild.nominal[k, 1] * weights
        torch.testing.assert_close(plan.coefficients[k, 0], expected, rtol=1e-6, atol=1e-7)


def divided(prompts: int) -> tuple[list[Gram], Gram]:
    """The profile of a run in three groups of elements: each by itself, and all with groups."""
    full = run_reference(blind, noise(prompts), sigmas=SIGMAS)
    alone, shares = [], []
    for rows in (slice(0, 2), slice(2, 5), slice(5, 8)):
        piece = Trajectory(*(tuple(u[:, rows] for u in us) for us in (full.latents, full.outputs)))
        alone.append(profile_run(piece).gram)
        shares.append(alone[-1].products * (rows.stop - rows.start) / 8)
    return alone, Gram(torch.stack(shares, dim=1).flatten(0, 1), groups=3)


@pytest.mark.parametrize("order", [0, 2])
def test_without_sensitivity_groups_are_latents_of_their_own(order: int) -> None:
    """The same coefficients, and squared errors that add up by the number of elements."""
    alone, gram = divided(2)
    fit = Fit(history=2, sensitivity=0.0, order=order)
    mask, which = schedule_mask([STEPS, (0, 1, 7)], 12), torch.tensor([0, 1])
    together = System(gram, NOMINAL, fit).simulate(mask, which)
    assert together.coefficients.shape == (2, 12, 3, 3)
    square = torch.zeros(2, 13, dtype=torch.float64)
    for group, (own, elements) in enumerate(zip(alone, (2, 3, 3), strict=True)):
        single = System(own, NOMINAL, fit).simulate(mask, which)
        torch.testing.assert_close(together.coefficients[:, :, group], single.coefficients[:, :, 0])
        square += single.errors.square() * elements / 8
    torch.testing.assert_close(together.errors, square.sqrt(), rtol=1e-6, atol=1e-7)
    groups = Groups(channels=3)
    (plan,) = fit_plans(gram, NOMINAL, schedules=[STEPS], fit=Fit(groups=groups))
    assert plan.groups == groups
    assert plan.coefficients.shape == (12, 3, 5)


def test_groups_come_no_further_from_the_reference_than_one_group() -> None:
    _, gram = divided(1)
    whole = Gram(gram.by_prompt.sum(1))
    fit = Fit(history=2, sensitivity=0.0, ridge=0.0)
    mask, first = schedule_mask([STEPS], 12), torch.zeros(1, dtype=torch.long)
    errors = [System(each, NOMINAL, fit).simulate(mask, first).errors[0] for each in (gram, whole)]
    assert errors[0][2] < errors[1][2]  # after the first reused step, from the same latent
    assert errors[0][-1] < 0.6 * errors[1][-1]


def test_sensitivity_of_groups_by_hand() -> None:
    """Two channels of one element: the error of the first disturbs the outputs of both."""
    x = [torch.tensor([values]).double() for values in ([4.0, 0.0], [3.0, 1.0], [1.0, 3.0])]
    v = [torch.tensor([values]).double() for values in ([-1.0, 1.0], [-2.0, 2.0])]
    vectors = torch.cat([*x, *v])  # (R, channels)
    products = torch.stack([c[:, None] * c / 2 for c in vectors.unbind(1)])
    gram = Gram(products, groups=2)
    nominal = torch.ones(2, 2).double()
    z = torch.ones(1, 2, 2, 2).double()
    z[0, 0, 0, 1] = 0.5  # the first step of the first channel covers half of its interval
    system = System(gram, nominal, Fit(history=1, sensitivity=1.0))
    mask, first = schedule_mask([(0, 1)], 2), torch.zeros(1, dtype=torch.long)
    errors = system.simulate(mask, first, z).errors[0]
    # |e|^2 = 0.5^2 / 2. Of each channel |dv|^2 / |dx|^2 = 1 / 2, so both outputs get |e|^2 / 2.
    assert errors.tolist() == pytest.approx([0.0, 0.125**0.5, (0.125 + 2 * 0.0625) ** 0.5])


def test_what_does_not_fit_is_refused(mild: Bench) -> None:
    with pytest.raises(ValueError, match="30 steps, but a nominal update of 5"):
        System(mild.gram, mild.nominal[:5], Fit())
    with pytest.raises(ValueError, match="step 0"):
        schedule_mask([(1, 2)], 5)
    with pytest.raises(ValueError, match="history"):
        Fit(history=0)
    with pytest.raises(ValueError, match="negative"):
        Fit(ridge=-1.0)
    with pytest.raises(ValueError, match="order must be from 0 to 2, got 3"):
        Fit(order=3)


def random_problem(batch: int, size: int) -> tuple[Floats, Floats]:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(batch, size + 1, 40, generator=generator, dtype=torch.float64)
    G = (rows @ rows.mT).numpy()
    return G[:, :size, :size], G[:, :size, size]


def test_without_a_ridge_the_latent_is_nominal_and_the_rest_optimal() -> None:
    A, b = random_problem(3, 4)
    prior = np.tile([0.7, -0.1, 0, 0], (3, 1))
    z = solve_ridge(A, b, prior, ridge=0.0)
    assert (z[:, 0] == 0.7).all()
    gradient = np.einsum("bij,bj->bi", A, z) - b
    assert np.abs(gradient[:, 1:]).max() < 1e-8


def test_a_strong_ridge_ends_at_the_nominal_update() -> None:
    A, b = random_problem(3, 4)
    prior = np.tile([0.7, -0.1, 0, 0], (3, 1))
    z = solve_ridge(A, b, prior, ridge=1e9)
    np.testing.assert_allclose(z, prior, rtol=0, atol=1e-8)


def test_an_output_that_does_not_exist_gets_no_weight() -> None:
    A, b = random_problem(2, 4)
    A[:, 3, :] = A[:, :, 3] = b[:, 3] = 0
    prior = np.tile([1.0, -0.1, 0, 0], (2, 1))
    z = solve_ridge(A, b, prior, ridge=1e-3)
    shorter = solve_ridge(A[:, :3, :3], b[:, :3], prior[:, :3], ridge=1e-3)
    assert (z[:, 3] == 0).all()
    np.testing.assert_allclose(z[:, :3], shorter, rtol=0, atol=1e-10)


def test_nothing_but_zeros_is_solved_by_the_pull_alone() -> None:
    prior = np.array([[1.0, -0.1, 0.2]])
    z = solve_ridge(np.zeros((1, 3, 3)), np.zeros((1, 3)), prior, ridge=1e-3)
    np.testing.assert_allclose(z, prior)


def following(x: Tensor, sigma: Tensor) -> Tensor:
    """A network whose output follows its latent with a slope that depends on sigma."""
    return blind(x, sigma) + slope(sigma) * x


def slope(sigma: Tensor) -> Tensor:
    return 2 * sigma - 0.5


@pytest.mark.parametrize("history", [1, 2, 4])
def test_with_the_response_of_a_linear_network_the_simulation_is_exact(history: int) -> None:
    full = run_reference(following, noise(1), sigmas=SIGMAS)
    gram, steps = profile_run(full).gram, (0, 2, 3, 5, 6, 8, 10)
    fit = Fit(history=history, ridge=1e-3, response=True)
    system = System(gram, NOMINAL, fit, slope(SIGMAS[:-1]))
    simulation = system.simulate(schedule_mask([steps], 12), torch.zeros(1, dtype=torch.long))
    plan = refitted(
        following, full.latents, sigmas=SIGMAS, compute_steps=steps, nominal=NOMINAL, fit=fit
    )
    torch.testing.assert_close(plan.coefficients, simulation.coefficients[0], rtol=1e-6, atol=1e-9)
    latents = run(following, noise(1), TrajectoryStepper(plan), sigmas=SIGMAS)
    measured = [rmse(x, y) for x, y in zip(latents, full.latents, strict=True)]
    assert simulation.errors[0].tolist() == pytest.approx(measured, rel=1e-6, abs=2e-7)
    assert measured[-1] > 1e-4  # the schedule does lose something
    blindly = System(gram, NOMINAL, Fit(history=history, ridge=1e-3, sensitivity=0.0))
    other = blindly.simulate(schedule_mask([steps], 12), torch.zeros(1, dtype=torch.long))
    assert not torch.allclose(other.coefficients, simulation.coefficients, rtol=1e-3)


def test_without_a_response_there_is_none() -> None:
    gram = profile_run(run_reference(following, noise(2), sigmas=SIGMAS)).gram
    mask, which = schedule_mask([STEPS], 12), torch.zeros(1, dtype=torch.long)
    none = System(gram, NOMINAL, Fit(response=True), torch.zeros(12, dtype=torch.float64))
    assumed = System(gram, NOMINAL, Fit(sensitivity=0.0))
    found, other = none.simulate(mask, which), assumed.simulate(mask, which)
    torch.testing.assert_close(found.coefficients, other.coefficients)
    torch.testing.assert_close(found.errors, other.errors)


@pytest.mark.parametrize("response", [None, torch.zeros(11)])
def test_a_fit_with_a_response_needs_it(response: Tensor | None) -> None:
    gram = profile_run(run_reference(blind, noise(1), sigmas=SIGMAS)).gram
    with pytest.raises(ValueError, match="needs the response of the outputs on 12 steps"):
        System(gram, NOMINAL, Fit(response=True), response)
