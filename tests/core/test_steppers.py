"""Each method's steps, driven by ``run``: rectified update, refit, threshold search, gain fit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ertacache.core.distance import distances
from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.gram import Trajectory, profile_run
from ertacache.core.paper import (
    RectifyMode,
    RectifySums,
    adjusted_sigmas,
    fit_rectification,
    rectify,
    relative_l1,
    residual,
    reuse_distances,
    search_profile,
    step_scale,
)
from ertacache.core.paper_steppers import GainFit, PaperStepper, ThresholdSearch
from ertacache.core.plans import PaperPlan, Reuse, TrajectoryPlan, uniform_schedule
from ertacache.core.sampler import Euler, SolverFactory, run, run_reference
from ertacache.core.search import spread_schedule
from ertacache.core.simulate import Fit, fit_plans
from ertacache.core.steppers import (
    FullStepper,
    RefitStepper,
    TrajectoryStepper,
    combine,
    fit_step,
    make_stepper,
)
from tests.core.rings import (
    Bench,
    Counted,
    measured_scales,
    plain_plan,
    rectified_plan,
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


def test_the_refitted_plan_runs_as_it_was_fitted(mild: Bench) -> None:
    """On the prompts that it was fitted on: the same latents, at the distances that it reports."""
    steps, latents = (0, 5, 11, 20), mild.reference.latents
    stepper = RefitStepper(latents, compute_steps=steps, nominal=mild.nominal, fit=Fit())
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
    steps, nominal, fit = (0, 5, 11, 20), mild.nominal, Fit()
    part = [x[fitted] for x in latents]
    some = RefitStepper(latents, compute_steps=steps, nominal=nominal, fit=fit, fitted=fitted)
    only = RefitStepper(part, compute_steps=steps, nominal=nominal, fit=fit)
    assert bool((some.distances == torch.inf).all())
    run(mild.flow.velocity, latents[0], some, sigmas=mild.sigmas)
    run(mild.flow.velocity, part[0], only, sigmas=mild.sigmas)
    assert torch.equal(some.coefficients, only.coefficients)
    end = run(mild.flow.velocity, latents[0], TrajectoryStepper(some.plan()), sigmas=mild.sigmas)
    assert torch.equal(some.distances, distances(end[-1], latents[-1]))


@pytest.mark.parametrize(
    "fitted", [None, (0, 3, 9, 12), (0, 3, 9)], ids=["all", "some of both", "of one batch only"]
)
def test_two_batches_that_add_up_are_one(mild: Bench, fitted: tuple[int, ...] | None) -> None:
    """Ten prompts and six, side by side: at every step each waits for the sums of the other."""
    latents, batches = mild.reference.latents, (slice(0, 10), slice(10, 16))
    parts, both = [torch.empty(0)] * 2, threading.Barrier(2)

    def refit(batch: slice, reduce: Callable[[Tensor], Tensor] | None) -> RefitStepper:
        inside = range(16)[batch]
        chosen = [k - inside[0] for k in fitted or inside if k in inside]
        stepper = RefitStepper(
            [x[batch] for x in latents],
            compute_steps=(0, 5, 11, 20),
            nominal=mild.nominal,
            fit=Fit(),
            fitted=torch.tensor(chosen, dtype=torch.long),
            reduce=reduce,
        )
        run(mild.flow.velocity, latents[0][batch], stepper, sigmas=mild.sigmas)
        return stepper

    def meet(number: int) -> RefitStepper:
        def add(part: Tensor) -> Tensor:
            parts[number] = part
            both.wait(timeout=60)
            total = parts[0] + parts[1]
            both.wait(timeout=60)
            return total

        return refit(batches[number], add)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(meet, range(2))
    whole = refit(slice(0, 16), None)
    assert torch.equal(one.coefficients, other.coefficients)
    torch.testing.assert_close(one.coefficients, whole.coefficients, rtol=1e-6, atol=1e-9)
    found = torch.cat([one.distances, other.distances])
    torch.testing.assert_close(found, whole.distances, rtol=1e-6, atol=1e-9)


def test_a_fitted_step_by_hand() -> None:
    x, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    nominal = torch.tensor([1.0, -1.0], dtype=torch.float64)
    target = torch.tensor([[0.5, -2.0]])
    # The latent keeps its nominal coefficient; a ridge of 1 is the mean of fit and nominal.
    for ridge, a in ((0.0, -2.0), (1.0, -1.5), (1e9, -1.0)):
        z = fit_step(x, [v], target, prior=nominal, ridge=ridge)
        assert z[0].tolist() == pytest.approx([1.0, a])


# Algorithm 2


def norms_of(reference: Trajectory, reuse: Reuse) -> Tensor:
    return reuse_distances(profile_run(reference), reuse)[1].mean(0)


def search(
    reference: Trajectory,
    sigmas: Tensor,
    lam: float,
    reuse: Reuse = "residual",
    *,
    solver: SolverFactory = Euler,
) -> ThresholdSearch:
    stepper = ThresholdSearch(lam, norms=norms_of(reference, reuse), reuse=reuse)
    run(RING.velocity, reference.latents[0], stepper, sigmas=sigmas, solver=solver)
    return stepper


def search_as_printed(
    reference: Trajectory, sigmas: Tensor, lam: float, reuse: Reuse, solver: SolverFactory
) -> tuple[tuple[int, ...], list[float], list[float]]:
    """Algorithm 2 as printed: the computed steps, with eq. 12 and phi of every step."""
    own, x, T = solver(sigmas), reference.latents[0], reference.num_steps
    steps: list[int] = []
    errors, scales = [0.0] * T, [1.0] * T
    r_tilde = used = torch.empty(0)
    for k in range(T):
        v = RING.velocity(x, sigmas[k])
        r = residual(v, x) if reuse == "residual" else v
        r_gt = reference.outputs[k]
        r_gt = residual(r_gt, reference.latents[k]) if reuse == "residual" else r_gt
        if k not in (0, T - 1):
            errors[k] = relative_l1(r_tilde, r, reference=r_gt)
        if k not in (0, T - 1) and errors[k] < lam:
            v_tilde = x + r_tilde if reuse == "residual" else r_tilde
            scales[k] = step_scale(v_tilde, v, previous=used)
            used = v_tilde
        else:
            steps.append(k)
            r_tilde, used = r, v
        x = own.step(used, k, x)
    return tuple(steps), errors, scales


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
@pytest.mark.parametrize("solver", [Euler, AdamsBashforth])
def test_the_search_is_algorithm_2(reuse: Reuse, solver: SolverFactory) -> None:
    reference = run_reference(RING.velocity, NOISE, sigmas=SIGMAS, solver=solver)
    found = set()
    for lam in THRESHOLDS:
        stepper = search(reference, SIGMAS, lam, reuse, solver=solver)
        steps, errors, scales = search_as_printed(reference, SIGMAS, lam, reuse, solver)
        assert stepper.compute_steps == steps
        assert stepper.errors.tolist() == pytest.approx(errors, rel=1e-9)
        assert stepper.step_scales.tolist() == pytest.approx(scales, abs=1e-12)
        assert (steps[0], steps[-1]) == (0, 19)
        found.add(steps)
    assert len(found) > 10


def test_the_search_evaluates_the_network_once_per_step() -> None:
    reference = run_reference(RING.velocity, NOISE, sigmas=SIGMAS)
    network = Counted(RING.velocity)
    stepper = ThresholdSearch(0.5, norms=norms_of(reference, "residual"))
    run(network, NOISE, stepper, sigmas=SIGMAS)
    assert network.calls == 20 > len(stepper.compute_steps)


def test_a_search_without_reuse_is_the_full_run() -> None:
    reference = run_reference(RING.velocity, NOISE, sigmas=SIGMAS)
    stepper = ThresholdSearch(0.0, norms=norms_of(reference, "residual"))
    latents = run(RING.velocity, NOISE, stepper, sigmas=SIGMAS)
    assert stepper.compute_steps == tuple(range(20))
    assert stepper.step_scales.tolist() == [1.0] * 20
    assert all(torch.equal(a, b) for a, b in zip(latents, reference.latents, strict=True))


def test_the_search_reuses_strictly_below_the_threshold() -> None:
    sigmas = torch.linspace(1, 0, 5, dtype=torch.float64)

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.full_like(x, 2.0 if sigma == 1 else 1.0)

    norms = norms_of(run_reference(field, NOISE, sigmas=sigmas), "velocity")
    above = math.nextafter(1.0, 2.0)
    for lam, steps in ((1.0, (0, 1, 3)), (above, (0, 3))):  # |2 - 1| / |1| is exactly 1
        stepper = ThresholdSearch(lam, norms=norms, reuse="velocity")
        run(field, NOISE, stepper, sigmas=sigmas)
        assert stepper.compute_steps == steps


@pytest.mark.parametrize("steps", [1, 2])
def test_the_search_of_a_run_too_short_to_reuse(steps: int) -> None:
    sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    reference = run_reference(RING.velocity, NOISE, sigmas=sigmas)
    assert search(reference, sigmas, 9.0).compute_steps == tuple(range(steps))


def test_another_network_computes_its_first_step() -> None:
    norms, x = torch.ones(5, dtype=torch.float64), torch.ones(1)
    stepper = ThresholdSearch(9.0, norms=norms)
    for k in range(5):
        if k == 2:
            stepper.switch()
            assert not list(stepper.held())
        assert stepper.computes(k)
        stepper.step(k, x, x * k, lambda v: v)
        assert len(list(stepper.held())) == 1
    assert stepper.compute_steps == (0, 2, 4)


def test_a_calibration_run_evaluates_every_step() -> None:
    plan = PaperPlan((0, 19), "residual", SIGMAS)
    for stepper in (ThresholdSearch(0.1, norms=torch.ones(20)), GainFit(plan)):
        with pytest.raises(ValueError, match="step 3 was reused, but a calibration run evaluates"):
            stepper.step(3, NOISE, None, no_step)


def test_the_search_on_a_profile_is_the_search_where_outputs_depend_on_sigma_alone() -> None:
    v = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sigmas = torch.linspace(1, 0, 13, dtype=torch.float64)

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return v[round((1 - sigma.item()) * 12)].cumsum(0)

    reference = run_reference(field, NOISE.new_zeros(5, 3), sigmas=sigmas)
    l1, norm = reuse_distances(profile_run(reference), "velocity")
    found = set()
    for lam in THRESHOLDS:
        stepper = ThresholdSearch(lam, norms=norm.mean(0), reuse="velocity")
        run(field, reference.latents[0], stepper, sigmas=sigmas)
        assert search_profile(l1, norm, threshold=lam) == stepper.compute_steps
        found.add(stepper.compute_steps)
    assert len(found) > 3


def test_measured_scales_are_1_on_computed_steps_only() -> None:
    steps = uniform_schedule(30, 10)
    phi = measured_scales(
        RING.velocity, RING.noise(32, seed=0), sigmas=shifted_sigmas(30), compute_steps=steps
    )
    assert phi.dtype == torch.float64
    assert all((phi[k] == 1) == (k in steps) for k in range(30))
    assert bool(((phi >= 0) & (phi <= 1)).all())


# Algorithm 1, and its gain and bias


def test_a_step_that_follows_another_network_cannot_be_reused() -> None:
    stepper = PaperStepper(PaperPlan((0, 19), "residual", SIGMAS))
    with pytest.raises(ValueError, match="step 1 is to be reused, but no step was computed"):
        stepper.step(1, NOISE, None, no_step)
    stepper.step(0, NOISE, NOISE, lambda v: v)
    stepper.step(1, NOISE, None, lambda v: v)
    assert len(list(stepper.held())) == 1
    stepper.switch()
    assert not list(stepper.held())
    with pytest.raises(ValueError, match="step 2 is to be reused, but no step was computed"):
        stepper.step(2, NOISE, None, no_step)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_outputs_in_half_precision_are_reused_in_single(reuse: Reuse) -> None:
    stepper = PaperStepper(PaperPlan((0, 19), reuse, SIGMAS))
    x, v = torch.tensor([1.0 + 1e-6]), torch.tensor([2.0], dtype=torch.bfloat16)
    stepper.step(0, x, v, lambda v: v)
    used: list[Tensor] = []
    stepper.step(1, x, None, lambda v: used.append(v) or v)
    assert used[0].dtype == torch.float32
    torch.testing.assert_close(used[0], v.float(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
@pytest.mark.parametrize(("mode", "shape"), [("scalar", ()), ("channel", (2,)), ("element", (2,))])
def test_the_fit_fills_a_plan(reuse: Reuse, mode: RectifyMode, shape: tuple[int, ...]) -> None:
    sigmas, steps, noise = shifted_sigmas(12), uniform_schedule(12, 5), RING.noise(64, seed=0)
    phi = measured_scales(RING.velocity, noise, sigmas=sigmas, compute_steps=steps, reuse=reuse)
    adjusted = adjusted_sigmas(sigmas, phi)
    stepper = GainFit(PaperPlan(steps, reuse, adjusted), mode=mode)
    run(RING.velocity, noise, stepper, sigmas=sigmas)
    plan = stepper.plan()
    assert (plan.compute_steps, plan.reuse) == (steps, reuse)
    assert torch.equal(plan.sigmas, adjusted)
    assert plan.gain is not None
    assert plan.bias is not None
    assert plan.gain.shape == plan.bias.shape == (12, *shape)
    v = RING.velocity(noise, 1.0)
    for k in range(12):
        kept = torch.equal(rectify(v, gain=plan.gain[k], bias=plan.bias[k]), v)
        assert kept == (k in steps)


def test_each_step_is_fitted_behind_the_rectified_ones() -> None:
    """The second reused step in a row is fitted at the latent that the rectified first reaches."""
    sigmas = shifted_sigmas(4)
    plan = rectified_plan(RING.velocity, NOISE, PaperPlan((0, 3), "velocity", sigmas))
    gain, bias = plan.gain, plan.bias
    assert gain is not None
    assert bias is not None
    d, v = sigmas.diff(), RING.velocity(NOISE, sigmas[0])
    x = NOISE + d[0] * v
    x = x + d[1] * rectify(v, gain=gain[1], bias=bias[1])
    sums = RectifySums.of(v, RING.velocity(x, sigmas[2]), mode="scalar")
    torch.testing.assert_close(
        torch.stack([gain[2], bias[2]]), torch.stack(fit_rectification(sums)), rtol=0, atol=1e-12
    )


def test_a_run_without_reuse_is_fitted_to_no_change() -> None:
    plan = rectified_plan(RING.velocity, NOISE, PaperPlan(tuple(range(20)), "residual", SIGMAS))
    assert plan.gain is not None
    assert plan.bias is not None
    assert plan.gain.tolist() == [0.0] * 20
    assert plan.bias.tolist() == [-2.0] * 20


def test_the_fit_computes_the_first_step_of_another_network() -> None:
    stepper = GainFit(PaperPlan((0, 19), "residual", SIGMAS))
    stepper.step(0, NOISE, NOISE, lambda v: v)
    stepper.switch()
    assert not list(stepper.held())
    used: list[Tensor] = []
    stepper.step(1, NOISE, 2 * NOISE, lambda v: used.append(v) or v)
    assert torch.equal(used[0], 2 * NOISE)
    assert len(list(stepper.held())) == 1
