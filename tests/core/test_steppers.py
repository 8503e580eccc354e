"""Trajectory rectification, driven by ``run``: the rectified update, per group, and its refit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from ertacache.core.distance import distances
from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.gram import profile_run
from ertacache.core.groups import ONE_GROUP, Groups, Layout
from ertacache.core.paper_steppers import PaperStepper
from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.core.sampler import run, run_reference
from ertacache.core.search import spread_schedule
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import (
    FullStepper,
    RefitStepper,
    ResponseStepper,
    TrajectoryStepper,
    combine,
    fit_step,
    make_stepper,
    response_of,
)
from tests.core.filters import grouped_update
from tests.core.rings import (
    Bench,
    plain_plan,
    refitted,
    solved_third,
)
from tests.core.solvers import AdamsBashforth, euler_update

RING = GaussianRing(2.0, 0.3)
SIGMAS = shifted_sigmas(20)
NOISE = RING.noise(8, seed=0)
THRESHOLDS = [i / 50 for i in range(60)]


def no_step(v: Tensor) -> Tensor:
    raise AssertionError("the plan is the solver: the scheduler's step is not used")


# Trajectory rectification


def test_combination_by_hand() -> None:
    x, v = torch.tensor([2.0]), [torch.tensor([10.0]), torch.tensor([100.0])]
    assert combine(x, v, [0.5, 0.1, -0.01]).item() == pytest.approx(1.0)
    assert combine(x, v[:1], [0.5, 0.1, -0.01]).item() == pytest.approx(2.0)


def test_half_precision_stays_half_precision() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert combine(x, [x], [1.0, -0.5]).dtype == torch.bfloat16


def test_the_history_is_the_newest_outputs_across_networks() -> None:
    z = torch.tensor([[1.0, 1.0, 10.0]] * 4, dtype=torch.float64)[:, None]
    stepper = TrajectoryStepper(TrajectoryPlan((0, 1, 2), z))
    x, one = torch.zeros(1), torch.ones(1)
    assert stepper.step(0, x, one, no_step).item() == 1
    assert stepper.step(1, x, 2 * one, no_step).item() == 2 + 10
    stepper.switch()
    assert stepper.step(2, x, 3 * one, no_step).item() == 3 + 20
    assert stepper.step(3, x, None, no_step).item() == 3 + 20
    assert [v.item() for v in stepper.held()] == [3, 2]


@pytest.mark.parametrize("method", ["trajectory", "paper"])
def test_a_cache_kept_elsewhere_changes_nothing(mild: Bench, method: str) -> None:
    steps = (0, 4, 9, 14, 20, 29)
    plan = plain_plan(mild.sigmas, steps)
    paper = PaperPlan(steps, "residual", mild.sigmas)
    here, there = (
        make_stepper(plan if method == "trajectory" else paper, cache_device=device)
        for device in (None, torch.device("cpu"))
    )
    assert isinstance(here, TrajectoryStepper if method == "trajectory" else PaperStepper)
    ends = [
        run(mild.flow.velocity, mild.heldout, stepper, sigmas=mild.sigmas)[-1]
        for stepper in (here, there)
    ]
    assert torch.equal(*ends)
    assert all(v.device == torch.device("cpu") for v in there.held())


def test_a_full_run_is_the_solvers(mild: Bench) -> None:
    stepper = FullStepper(30)
    latents = run(
        mild.flow.velocity, mild.heldout, stepper, sigmas=mild.sigmas, solver=AdamsBashforth
    )
    full = run_reference(
        mild.flow.velocity, mild.heldout, sigmas=mild.sigmas, solver=AdamsBashforth
    )
    assert all(map(torch.equal, latents, full.latents))
    assert list(stepper.held()) == []
    with pytest.raises(ValueError, match="step 3 was reused in a full run"):
        stepper.step(3, mild.heldout, None, no_step)


GRID = Layout(channel=2)
"""Frames before channels."""


def test_a_step_with_groups_is_that_of_explicit_filters() -> None:
    """Also while the history fills, and with the raw outputs of one branch behind it."""
    groups, shape, T = Groups(2, 3), (2, 3, 4, 6, 5), 6
    numbers = torch.Generator().manual_seed(0)
    z = torch.randn(T, groups.count, 5, generator=numbers, dtype=torch.float64)
    z[:, :, 0] = z[:, :1, 0]
    plan = TrajectoryPlan((0, 1, 3, 4), z, groups, branch=True)
    stepper = make_stepper(plan, layout=lambda latents: GRID)
    x = torch.randn(shape, generator=numbers, dtype=torch.float64)
    outputs: list[Tensor] = []
    raws: list[Tensor] = []
    for k in range(T):
        v = torch.randn(shape, generator=numbers, dtype=torch.float64)
        if stepper.computes(k):
            stepper.note_branch(v.square())
            outputs, raws = [v, *outputs][:2], [v.square(), *raws][:2]
        columns = [0, *range(1, 1 + len(outputs)), *range(3, 3 + len(raws))]
        unpacked = [vector.movedim(2, 1) for vector in (x, *outputs, *raws)]
        expected = grouped_update(unpacked[0], unpacked[1:], z[k][:, columns], groups)
        x = stepper.step(k, x, v if stepper.computes(k) else None, no_step)
        torch.testing.assert_close(x, expected.movedim(1, 2), rtol=1e-9, atol=1e-9)
        assert len(list(stepper.held())) == 2 * len(outputs)


def test_equal_coefficients_of_all_groups_are_one_group(mild: Bench) -> None:
    one = plain_plan(mild.sigmas, (0, 4, 9, 20, 29))
    groups = Groups(4, 2)
    same = TrajectoryPlan(one.compute_steps, one.coefficients.repeat(1, groups.count, 1), groups)
    noise = mild.reference.latents[0]
    ends = [
        run(mild.flow.velocity, noise, TrajectoryStepper(plan), sigmas=mild.sigmas)[-1]
        for plan in (one, same)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)


def test_the_branch_that_a_plan_needs_is_there_or_reported() -> None:
    z = torch.ones(3, 1, 3, dtype=torch.float64)
    stepper = TrajectoryStepper(TrajectoryPlan((0, 1), z, branch=True))
    x, v = torch.zeros(1), torch.ones(1)
    stepper.note_branch(10 * v)
    assert stepper.step(0, x, v, no_step).item() == 11
    with pytest.raises(ValueError, match=r"the latent \(1,\), but there is none: run with"):
        stepper.step(1, x, v, no_step)  # that of step 0 does not serve step 1
    stepper.note_branch(torch.ones(2))
    with pytest.raises(ValueError, match=r"but there is one of shape \(2,\): run with guidance"):
        stepper.step(1, x, v, no_step)
    without = TrajectoryStepper(TrajectoryPlan((0,), z[..., :2]))
    without.note_branch(v)
    assert list(without.held()) == []


# Closed-loop refit


def closed_loop_error(flow: Bench, steps: tuple[int, ...]) -> float:
    plan = refitted(
        flow.flow.velocity,
        flow.reference.latents,
        sigmas=flow.sigmas,
        compute_steps=steps,
        nominal=flow.nominal,
    )
    return flow.error(plan)


@pytest.mark.parametrize(
    ("radius", "width", "factor"), [(2.0, 0.3, 10.0), (4.0, 0.1, 4.0)], ids=["mild", "stiff"]
)
@pytest.mark.parametrize("num_steps", [30, 50])
def test_a_third_of_the_steps_is_many_times_closer_than_the_alternatives(
    radius: float, width: float, factor: float, num_steps: int
) -> None:
    flow, searched = solved_third(radius, width, num_steps)
    budget = num_steps // 3
    uniform = spread_schedule(num_steps, budget, {0})
    fewer = run_reference(
        flow.flow.velocity, flow.heldout, sigmas=shifted_sigmas(budget, 1.0)
    ).latents[-1]
    bar = min(flow.error(plain_plan(flow.sigmas, uniform)), rmse(fewer, flow.target)) / factor
    assert closed_loop_error(flow, uniform) < bar
    assert closed_loop_error(flow, searched.plan.compute_steps) < bar


def blind(x: Tensor, sigma: Tensor) -> Tensor:
    """A network that depends on sigma alone."""
    waves = torch.arange(1, 9, dtype=torch.float64) * sigma
    return (torch.sin(3 * waves) + 2 * torch.cos(waves * waves)).expand_as(x)


def test_a_network_that_depends_on_sigma_alone_gives_the_plan_of_its_profile() -> None:
    sigmas, steps = shifted_sigmas(12), (0, 2, 5, 6, 10)
    noise = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nominal = euler_update(sigmas)
    reference = run_reference(blind, noise, sigmas=sigmas)
    fit = Fit(history=2, sensitivity=0.0)
    (open_loop,) = fit_plans(profile_run(reference).gram, nominal, schedules=[steps], fit=fit)
    closed = refitted(
        blind, reference.latents, sigmas=sigmas, compute_steps=steps, nominal=nominal, fit=fit
    )
    assert closed.compute_steps == open_loop.compute_steps == steps
    assert torch.allclose(closed.coefficients, open_loop.coefficients, atol=1e-6)
    assert torch.equal(closed.coefficients[..., 0], open_loop.coefficients[..., 0])


def test_a_refit_evaluates_the_network_once_per_computed_step(mild: Bench) -> None:
    calls = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        calls.append(float(sigma))
        return mild.flow.velocity(x, sigma)

    refitted(
        denoise,
        mild.reference.latents,
        sigmas=mild.sigmas,
        compute_steps=(0, 5, 11),
        nominal=mild.nominal,
    )
    assert calls == [float(mild.sigmas[k]) for k in (0, 5, 11)]


@pytest.mark.parametrize(
    "fit", [Fit(), Fit(groups=Groups(8, 2)), Fit(order=2, ridge=0.1)], ids=["", "groups", "order"]
)
def test_the_refitted_plan_runs_as_it_was_fitted(mild: Bench, fit: Fit) -> None:
    """On the prompts that it was fitted on: the same latents, at the distances that it reports."""
    steps, latents = (0, 5, 11, 20), mild.reference.latents
    stepper = RefitStepper(latents, compute_steps=steps, nominal=mild.nominal, fit=fit)
    fitted = run(mild.flow.velocity, latents[0], stepper, sigmas=mild.sigmas)
    again = run(
        mild.flow.velocity, latents[0], TrajectoryStepper(stepper.plan()), sigmas=mild.sigmas
    )
    assert all(torch.equal(a, b) for a, b in zip(fitted, again, strict=True))
    assert torch.equal(stepper.distances, distances(fitted[-1], latents[-1]))
    assert stepper.distances.shape == (16,)
    assert len(list(stepper.held())) == 4


def test_prompts_that_are_not_fitted_on_run_along(mild: Bench) -> None:
    latents, fitted = mild.reference.latents, torch.tensor([1, 2, 5, 11])
    weights = torch.zeros(1, 16, dtype=torch.float64).index_fill(1, fitted, 1.0)
    steps, nominal, fit = (0, 5, 11, 20), mild.nominal, Fit()
    part = [x[fitted] for x in latents]
    some = RefitStepper(latents, compute_steps=steps, nominal=nominal, fit=fit, weights=weights)
    only = RefitStepper(part, compute_steps=steps, nominal=nominal, fit=fit)
    assert bool((some.distances == torch.inf).all())
    run(mild.flow.velocity, latents[0], some, sigmas=mild.sigmas)
    run(mild.flow.velocity, part[0], only, sigmas=mild.sigmas)
    assert torch.equal(some.coefficients, only.coefficients)
    end = run(mild.flow.velocity, latents[0], TrajectoryStepper(some.plan()), sigmas=mild.sigmas)
    assert torch.equal(some.distances, distances(end[-1], latents[-1]))


def meeting() -> Callable[[int], Callable[[Tensor], Tensor]]:
    """By the number of one of two threads, what waits for the part of the other and adds it."""
    parts, both = [torch.empty(0)] * 2, threading.Barrier(2)

    def add(number: int, part: Tensor) -> Tensor:
        parts[number] = part
        both.wait(timeout=60)
        total = parts[0] + parts[1]
        both.wait(timeout=60)
        return total

    return lambda number: partial(add, number)


@pytest.mark.parametrize("fit", [Fit(), Fit(groups=Groups(4, 2))], ids=["one group", "groups"])
@pytest.mark.parametrize(
    "fitted", [None, (0, 3, 9, 12), (0, 3, 9)], ids=["all", "some of both", "of one batch only"]
)
def test_two_batches_that_add_up_are_one(
    mild: Bench, fitted: tuple[int, ...] | None, fit: Fit
) -> None:
    """Ten prompts and six, side by side: at every step each waits for the sums of the other."""
    latents, batches, add = mild.reference.latents, (slice(0, 10), slice(10, 16)), meeting()

    def refit(batch: slice, reduce: Callable[[Tensor], Tensor] | None) -> RefitStepper:
        weights = torch.zeros(1, 16, dtype=torch.float64)
        for place in fitted or range(16):
            weights[0, place] = 1.0 + place
        stepper = RefitStepper(
            [x[batch] for x in latents],
            compute_steps=(0, 5, 11, 20),
            nominal=mild.nominal,
            fit=fit,
            weights=weights[:, batch],
            reduce=reduce,
        )
        run(mild.flow.velocity, latents[0][batch], stepper, sigmas=mild.sigmas)
        return stepper

    def meet(number: int) -> RefitStepper:
        return refit(batches[number], add(number))

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(meet, range(2))
    whole = refit(slice(0, 16), None)
    assert torch.equal(one.coefficients, other.coefficients)
    torch.testing.assert_close(one.coefficients, whole.coefficients, rtol=1e-6, atol=1e-9)
    found = torch.cat([one.distances, other.distances])
    torch.testing.assert_close(found, whole.distances, rtol=1e-6, atol=1e-9)


def test_several_fits_at_once(mild: Bench) -> None:
    """Two batches of which each follows its own: as two refits that know nothing of each other."""
    latents, batches, add = mild.reference.latents, (slice(0, 10), slice(10, 16)), meeting()

    def refit(number: int) -> RefitStepper:
        batch = batches[number]
        weights = torch.zeros(2, 10 if number == 0 else 6, dtype=torch.float64)
        weights[number] = 1.0
        stepper = RefitStepper(
            [x[batch] for x in latents],
            compute_steps=(0, 5, 11, 20),
            nominal=mild.nominal,
            fit=Fit(),
            weights=weights,
            follows=number,
            reduce=add(number),
        )
        run(mild.flow.velocity, latents[0][batch], stepper, sigmas=mild.sigmas)
        return stepper

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(refit, range(2)))
    for stepper, batch in zip(found, batches, strict=True):
        part = [x[batch] for x in latents]
        alone = RefitStepper(part, compute_steps=(0, 5, 11, 20), nominal=mild.nominal, fit=Fit())
        run(mild.flow.velocity, part[0], alone, sigmas=mild.sigmas)
        torch.testing.assert_close(stepper.coefficients, alone.coefficients, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(stepper.distances, alone.distances, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(found[0].coefficients, found[1].coefficients)


def test_a_fitted_step_by_hand() -> None:
    x, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    nominal = torch.tensor([1.0, -1.0], dtype=torch.float64)
    target = torch.tensor([[0.5, -2.0]])
    # The latent keeps its nominal coefficient; a ridge of 1 is the mean of fit and nominal.
    for ridge, a in ((0.0, -2.0), (1.0, -1.5), (1e9, -1.0)):
        z = fit_step(x, [v], target, prior=nominal, ridge=ridge)
        assert z[0, 0].tolist() == pytest.approx([1.0, a])


@pytest.mark.parametrize("groups", [ONE_GROUP, Groups(channels=2)], ids=["one group", "groups"])
def test_a_weight_of_2_is_a_prompt_that_is_there_twice(groups: Groups) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v, target = torch.randn(3, 2, 2, 6, generator=generator)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([[1.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    fit = {"prior": prior, "ridge": 0.1, "groups": groups}
    found = fit_step(x, [v], target, weights=weights, **fit)
    twice = [0, 1, 1]
    expected = fit_step(x[twice], [v[twice]], target[twice], **fit)
    torch.testing.assert_close(found[:1], expected)
    torch.testing.assert_close(found[1:], fit_step(x, [v], target, **fit))
    assert not torch.allclose(found[0], found[1])


def test_a_fitted_step_with_groups_fits_each_of_them() -> None:
    """Two channels: the same vectors, another target, another coefficient."""
    x, v = torch.zeros(1, 2, 4), torch.tensor([[[1.0, -1.0, 2.0, 0.0]] * 2])
    target = torch.stack([3 * v[0, 0], -v[0, 1]])[None]
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    z = fit_step(x, [v], target, prior=prior, ridge=0.0, groups=Groups(channels=2))
    torch.testing.assert_close(z[0], torch.tensor([[1.0, 3.0], [1.0, -1.0]]).double())
    one = fit_step(x, [v], target, prior=prior, ridge=0.0)
    torch.testing.assert_close(one[0], torch.tensor([[1.0, 1.0]]).double())  # in between


def uneven(x: Tensor, sigma: Tensor) -> Tensor:
    """Two channels that change differently with sigma; fine detail another way than the mean."""
    pace = torch.stack([torch.sin(5 * sigma), torch.cos(3 * sigma * sigma)])[:, None]
    mean = x.mean(-1, keepdim=True)
    return pace * mean + torch.exp(-2 * sigma) * (x - mean)


@pytest.mark.parametrize("groups", [Groups(2, 1), Groups(1, 2), Groups(2, 2)], ids=str)
def test_a_refit_with_groups_comes_closer_where_channels_and_bands_differ(groups: Groups) -> None:
    numbers = torch.Generator().manual_seed(0)
    start = torch.randn(6, 2, 2, generator=numbers, dtype=torch.float64)
    sigmas, steps = shifted_sigmas(12), (0, 3, 6, 9)
    full = run_reference(uneven, start, sigmas=sigmas)
    distance = {}
    for each in (ONE_GROUP, groups):
        stepper = RefitStepper(
            full.latents,
            compute_steps=steps,
            nominal=euler_update(sigmas),
            fit=Fit(history=1, ridge=1e-6, groups=each),
        )
        run(uneven, start, stepper, sigmas=sigmas)
        distance[each] = stepper.distances.square().mean().sqrt().item()
        assert stepper.plan().groups == each
    assert distance[groups] < distance[ONE_GROUP] / (100 if groups.count == 4 else 1.2)


def test_a_strong_ridge_of_a_refit_is_extrapolation(mild: Bench) -> None:
    """With groups and a branch: the polynomial of the outputs, nothing of the branch."""
    fit = Fit(history=3, ridge=1e9, order=2, groups=Groups(2, 2), branch=True)
    latents, steps = mild.reference.latents, (0, 5, 11, 20)
    stepper = RefitStepper(latents, compute_steps=steps, nominal=mild.nominal, fit=fit)

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        v = mild.flow.velocity(x, sigma)
        stepper.note_branch(v - x)
        return v

    run(denoise, latents[0], stepper, sigmas=mild.sigmas)
    plan = stepper.plan()
    assert (plan.groups, plan.branch, plan.history) == (fit.groups, True, 3)
    # Steps 11, 5 and 0 at step 14: the products of Lagrange.
    weights = torch.tensor([9 * 14 / (6 * 11), -3 * 14 / (6 * 5), 3 * 9 / (11 * 5)]).double()
    expected = torch.cat([mild.nominal[14, :1], mild.nominal[14, 1] * weights, torch.zeros(3)])
    torch.testing.assert_close(
        plan.coefficients[14], expected.expand(4, -1), rtol=1e-5, atol=1e-6, check_dtype=False
    )


def test_the_response_of_a_linear_network_is_its_slope() -> None:
    sigmas = shifted_sigmas(12)
    slopes = 2 * sigmas[:-1] - 0.5

    def following(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.sin(7 * sigma).expand_as(x) + (2 * sigma - 0.5) * x

    start = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    full = run_reference(following, start, sigmas=sigmas)
    plain = plain_plan(sigmas, (0, 3, 6, 9))
    stepper = ResponseStepper(plain, full.latents, run=euler_run(sigmas))
    latents = run(following, start, stepper, sigmas=sigmas)
    found = response_of(stepper.products)
    assert found[2:].tolist() == pytest.approx(slopes[2:].tolist(), rel=1e-6)
    assert found[:2].tolist() == pytest.approx([slopes[2].item()] * 2, rel=1e-6)  # no error there
    followed = run(following, start, TrajectoryStepper(plain), sigmas=sigmas)
    torch.testing.assert_close(latents[-1], followed[-1])
    with pytest.raises(ValueError, match="step 1 was reused"):
        stepper.step(1, start, None, advance=torch.clone)


def test_a_latent_that_leaves_its_output_out_has_no_response() -> None:
    sigmas = shifted_sigmas(4)
    run_of = euler_run(sigmas)
    run_of[4, 4] = 0.0  # the last step does not use the last output
    start = torch.ones(1, 2, dtype=torch.float64)
    full = run_reference(lambda x, sigma: x, start, sigmas=sigmas)
    stepper = ResponseStepper(plain_plan(sigmas, (0,)), full.latents, run=run_of)
    run(lambda x, sigma: x, start, stepper, sigmas=sigmas)
    assert stepper.products[3].tolist() == [0.0, 0.0]
    assert response_of(stepper.products)[2].item() == pytest.approx(1.0)


def euler_run(sigmas: Tensor) -> Tensor:
    """Euler's latents in the start and the outputs."""
    rows = torch.zeros(len(sigmas), len(sigmas), dtype=torch.float64)
    rows[:, 0] = 1.0
    for k, d in enumerate(sigmas.double().diff()):
        rows[k + 1 :, 1 + k] = d
    return rows
