"""The paper's method, driven by ``run``: threshold search, reuse, and the fit of gain and bias."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import GaussianRing, shifted_sigmas
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
from ertacache.core.plans import PaperPlan, Reuse, uniform_schedule
from ertacache.core.sampler import Euler, SolverFactory, run, run_reference
from tests.core.rings import Counted, measured_scales, rectified_plan
from tests.core.solvers import AdamsBashforth

RING = GaussianRing(2.0, 0.3)
SIGMAS = shifted_sigmas(20)
NOISE = RING.noise(8, seed=0)
THRESHOLDS = [i / 50 for i in range(60)]


def no_step(v: Tensor) -> Tensor:
    raise AssertionError("nothing was computed that the scheduler could step with")


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
