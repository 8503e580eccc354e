from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ertacache.core import gram
from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.gram import RunStatistics, fit_nominal, profile_run
from ertacache.core.solver import Euler, LinearSolver, SolverFactory, Trajectory, run_reference


def ring_run(prompts: int = 4, points: int = 10, *, solver: SolverFactory = Euler) -> Trajectory:
    flow = GaussianRing(2.0, 0.3)
    noise = flow.noise(prompts * points, seed=0).view(prompts, points, 2)
    return run_reference(flow.velocity, noise, sigmas=shifted_sigmas(6), solver=solver)


def part(run: Trajectory, index: tuple[slice, ...]) -> Trajectory:
    return Trajectory(tuple(x[index] for x in run.latents), tuple(v[index] for v in run.outputs))


def assert_same(a: RunStatistics, b: RunStatistics, tolerance: float = 1e-12) -> None:
    for field in fields(RunStatistics):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance, field.name


def test_numbers_by_hand() -> None:
    x0, x1 = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 2.0]])
    v0 = torch.tensor([[2.0, -2.0]])
    stats = profile_run(Trajectory((x0, x1), (v0,)))
    expected = torch.tensor([[5.0, 3.0, -2.0], [3.0, 2.0, -2.0], [-2.0, -2.0, 4.0]])
    assert torch.equal(stats.inner[0], expected.double())
    assert stats.means.tolist() == [[2.0, 1.0, 0.0]]
    assert stats.residual_norm.tolist() == [[3.0]]  # |2 - 1| and |-2 - 3|
    assert stats.residual_l1.tolist() == stats.output_l1.tolist() == [[[0.0]]]
    assert stats.output_norm.tolist() == [[2.0]]
    assert stats.elements.tolist() == [2]


def test_distances_are_those_of_residuals_and_outputs() -> None:
    run = ring_run()
    stats = profile_run(run)
    r = [v - x for v, x in zip(run.outputs, run.latents, strict=False)]
    assert stats.residual_l1[1, 2, 4].item() == pytest.approx(
        (r[2][1] - r[4][1]).abs().mean().item()
    )
    assert stats.output_l1[3, 0, 5].item() == pytest.approx(
        (run.outputs[0][3] - run.outputs[5][3]).abs().mean().item()
    )


def test_two_halves_joined_are_the_whole() -> None:
    run = ring_run()
    halves = [profile_run(part(run, (half,))) for half in (slice(0, 2), slice(2, 4))]
    assert_same(halves[0].join(halves[1]), profile_run(run))


def test_some_of_the_prompts() -> None:
    run = ring_run()
    assert_same(profile_run(run).select([2, 3]), profile_run(part(run, (slice(2, 4),))), 0)


def test_pieces_of_a_latent_add_up_to_the_whole() -> None:
    run = ring_run()
    pieces = [profile_run(part(run, (slice(None), s))) for s in (slice(0, 3), slice(3, 10))]
    assert_same(pieces[0] + pieces[1], profile_run(run))


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ring_run()
    whole = profile_run(run)
    monkeypatch.setattr(gram, "CHUNK", 7)
    assert_same(profile_run(run), whole)


def test_half_precision_runs_are_profiled_in_double() -> None:
    run = ring_run()
    half = Trajectory(
        tuple(x.bfloat16() for x in run.latents), tuple(v.bfloat16() for v in run.outputs)
    )
    wide = Trajectory(
        tuple(x.double() for x in half.latents), tuple(v.double() for v in half.outputs)
    )
    assert_same(profile_run(half), profile_run(wide), tolerance=0)


def test_nominal_update_of_euler() -> None:
    nominal = fit_nominal(profile_run(ring_run()))
    assert torch.equal(nominal[:, 0], torch.ones(6, dtype=torch.float64))
    assert torch.allclose(nominal[:, 1], shifted_sigmas(6).diff(), atol=1e-12)


def test_nominal_update_of_a_solver_that_scales_the_latent() -> None:
    c, b = torch.linspace(0.9, 1.1, 6).double(), torch.linspace(-0.3, -0.1, 6).double()

    def solver(sigmas: Tensor) -> LinearSolver:
        return LinearSolver(c, b[:, None])

    nominal = fit_nominal(profile_run(ring_run(solver=solver)), latent=None)
    assert torch.allclose(nominal[1:], torch.stack([c, b], 1)[1:], atol=1e-9)
    # At the start this flow's output is the latent itself: only the sum can be told.
    assert nominal[0].sum().item() == pytest.approx((c[0] + b[0]).item())


def test_what_does_not_fit_is_refused() -> None:
    stats = profile_run(ring_run())
    with pytest.raises(ValueError, match="inner must be"):
        replace(stats, inner=stats.inner[:, 1:])
    with pytest.raises(ValueError, match="not finite"):
        replace(stats, means=stats.means * torch.nan)
    with pytest.raises(ValueError, match="symmetric"):
        replace(stats, inner=stats.inner + torch.arange(13).double())
    with pytest.raises(ValueError, match="output_l1 must be symmetric"):
        replace(stats, output_l1=stats.output_l1 + torch.arange(6).double())
    with pytest.raises(ValueError, match="step counts"):
        stats.join(profile_run(part_of_steps(ring_run(), 3)))
    with pytest.raises(ValueError, match="no elements"):
        profile_run(part(ring_run(), (slice(None), slice(0, 0))))


def part_of_steps(run: Trajectory, steps: int) -> Trajectory:
    return Trajectory(run.latents[: steps + 1], run.outputs[:steps])
