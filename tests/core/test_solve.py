from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ertacache.core.flows import rmse, shifted_sigmas
from ertacache.core.gram import profile_run
from ertacache.core.plan import TrajectoryPlan
from ertacache.core.sampler import plain_plan, run_trajectory
from ertacache.core.solve import Fit, System, fit_plans, predict_errors, schedule_mask
from ertacache.core.solver import Trajectory, run_reference
from tests.core.conftest import Bench

SIGMAS = shifted_sigmas(12)
NOMINAL = torch.stack([torch.ones(12).double(), SIGMAS.diff()], dim=1)
STEPS = (0, 2, 5, 6, 10)


def blind(x: Tensor, sigma: Tensor) -> Tensor:
    """A network that looks at the time alone: then simulation is exact."""
    waves = torch.arange(1, 9, dtype=torch.float64) * sigma
    return (torch.sin(3 * waves) + 2 * torch.cos(waves * waves)).expand_as(x)


def noise(prompts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(prompts, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("free_latent", [False, True])
@pytest.mark.parametrize("history", [1, 3])
def test_predicted_errors_are_the_measured_ones(history: int, free_latent: bool) -> None:
    reference = run_reference(blind, noise(3), sigmas=SIGMAS)
    stats = profile_run(reference)
    fit = Fit(history=history, free_latent=free_latent, sensitivity=0.0)
    (plan,) = fit_plans(stats, NOMINAL, schedules=[STEPS], fit=fit)
    run = run_trajectory(blind, noise(3), sigmas=SIGMAS, plan=plan)
    predicted = predict_errors(stats, NOMINAL, plan=plan, sensitivity=0.0)
    for p in range(3):
        measured = [rmse(x[p], y[p]) for x, y in zip(run.latents, reference.latents, strict=True)]
        assert predicted[p].tolist() == pytest.approx(measured, abs=2e-7)
    assert predicted[:, -1].max() > 1e-3  # the schedule does lose something


def test_every_step_lands_nearest_to_the_reference() -> None:
    reference = run_reference(blind, noise(2), sigmas=SIGMAS)
    stats = profile_run(reference)
    fit = Fit(history=2, ridge=0.0, sensitivity=0.0)
    (plan,) = fit_plans(stats, NOMINAL, schedules=[STEPS], fit=fit)
    best = predict_errors(stats, NOMINAL, plan=plan, sensitivity=0.0).square().mean(0)
    for step in (3, 4, 10):
        for shift in (-1e-3, 1e-3):
            outputs = plan.outputs.clone()
            outputs[step, 0] += shift
            other = replace(plan, outputs=outputs)
            errors = predict_errors(stats, NOMINAL, plan=other, sensitivity=0.0)
            assert errors.square().mean(0)[step + 1] > best[step + 1]


def test_a_strong_ridge_is_plain_reuse(mild: Bench) -> None:
    steps = (0, 4, 9, 20, 29)
    (plan,) = fit_plans(mild.statistics, mild.nominal, schedules=[steps], fit=Fit(ridge=1e9))
    plain = plain_plan(mild.sigmas, steps)
    assert torch.allclose(plan.outputs[:, :1], plain.outputs, atol=1e-7)
    assert plan.outputs[:, 1:].abs().max() < 1e-7
    assert torch.equal(plan.latent, plain.latent)


def test_all_steps_computed_is_the_full_run(mild: Bench) -> None:
    (plan,) = fit_plans(mild.statistics, mild.nominal, schedules=[range(30)], fit=Fit())
    assert mild.error(plan) < 1e-7


def test_schedules_do_not_disturb_each_other(mild: Bench) -> None:
    schedules = [(0, 4, 9, 20), (0, 1, 2, 29), tuple(range(0, 30, 2))]
    together = fit_plans(mild.statistics, mild.nominal, schedules=schedules, fit=Fit())
    for schedule, plan in zip(schedules, together, strict=True):
        (alone,) = fit_plans(mild.statistics, mild.nominal, schedules=[schedule], fit=Fit())
        assert torch.allclose(plan.outputs, alone.outputs, atol=1e-9)
        assert plan.compute_steps == schedule


def test_history_holds_only_what_was_computed(mild: Bench) -> None:
    (plan,) = fit_plans(mild.statistics, mild.nominal, schedules=[(0, 3, 9)], fit=Fit(history=4))
    given = (plan.outputs != 0).sum(1).tolist()
    assert given == [1] * 3 + [2] * 6 + [3] * 21


def test_sensitivity_by_hand() -> None:
    """One element, one prompt: an output computed at a latent that is off by e is off by L e."""
    x = [torch.tensor([[value]]).double() for value in (4.0, 3.0, 1.0)]
    v = [torch.tensor([[value]]).double() for value in (-1.0, -2.0)]
    stats = profile_run(Trajectory(tuple(x), tuple(v)))
    nominal = torch.ones(2, 2).double()
    z = torch.ones(2, 3).double()
    z[:, 2] = 0
    z[0, 1] = 0.5  # the first step goes half the way: e = 0.5
    plan = TrajectoryPlan((0, 1), z[:, 0], z[:, 1:])
    still = predict_errors(stats, nominal, plan=plan, sensitivity=0.0)[0].tolist()
    assert still == pytest.approx([0.0, 0.5, 0.5])
    # L = |v_1 - v_0| / |x_1 - x_0| = 1: the second output brings 0.5 more, independently.
    moved = predict_errors(stats, nominal, plan=plan, sensitivity=1.0)[0].tolist()
    assert moved == pytest.approx([0.0, 0.5, (0.25 + 0.25) ** 0.5])


def test_what_does_not_fit_is_refused(mild: Bench) -> None:
    with pytest.raises(ValueError, match="30 steps, but a nominal update of 5"):
        System(mild.statistics.inner, mild.nominal[:5], Fit())
    with pytest.raises(ValueError, match="step 0"):
        schedule_mask([(1, 2)], 5)
    with pytest.raises(ValueError, match="history"):
        Fit(history=0)
    with pytest.raises(ValueError, match="negative"):
        Fit(ridge=-1.0)
