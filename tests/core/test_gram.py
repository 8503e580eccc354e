"""Statistics of full runs: by hand, joined over prompts, added over pieces, from a later step."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from ertacache.core import gram
from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.gram import RunStatistics, Trajectory, gram_of, profile_run
from ertacache.core.sampler import run_reference


def ring_run(prompts: int = 4, points: int = 10) -> Trajectory:
    flow = GaussianRing(2.0, 0.3)
    noise = flow.noise(prompts * points, seed=0).view(prompts, points, 2)
    return run_reference(flow.velocity, noise, sigmas=shifted_sigmas(6))


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


def test_steps_from_a_later_one_are_those_of_a_run_that_begins_there() -> None:
    full = ring_run()
    later = Trajectory(full.latents[2:], full.outputs[2:])
    assert_same(profile_run(full).from_step(2), profile_run(later), 1e-15)


def test_named_places_and_products() -> None:
    full = ring_run()
    G = profile_run(full).gram
    assert (G.num_steps, G.size) == (6, 13)
    vectors = [*full.latents, *full.outputs]
    for a, b in ((G.x(0), G.x(6)), (G.x(2), G.v(3)), (G.v(0), G.v(5))):
        expected = (vectors[a] * vectors[b]).flatten(1).mean(1)
        torch.testing.assert_close(G.between(a, b), expected, rtol=0, atol=1e-12)
    squares = torch.stack([v.square().flatten(1).mean(1) for v in vectors], dim=1)
    torch.testing.assert_close(G.squares, squares, rtol=0, atol=1e-12)
    torch.testing.assert_close(G.mean().products[0], G.products.mean(0), rtol=0, atol=0)


def test_the_rate_of_change_is_that_of_outputs_over_latents() -> None:
    full = ring_run()
    rate = profile_run(full).gram.output_rate()
    assert rate[:, 0].tolist() == [0.0] * 4
    for k in range(1, 6):
        v = (full.outputs[k] - full.outputs[k - 1]).square().flatten(1).sum(1)
        x = (full.latents[k] - full.latents[k - 1]).square().flatten(1).sum(1)
        torch.testing.assert_close(rate[:, k], v / x, rtol=1e-9, atol=0)


def test_the_rate_of_change_is_0_where_the_latent_does_not_move() -> None:
    x, v = torch.ones(1, 2), torch.zeros(1, 2)
    still = profile_run(Trajectory((x, x, x), (v, x)))
    assert still.gram.output_rate().tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_folds_are_means_of_prompts_and_of_the_rest(count: int) -> None:
    G = profile_run(ring_run()).gram
    held, rest, size = G.folds(count)
    assert size.sum().item() == 4
    for i in range(count):
        own = [p for p in range(4) if p % count == i]
        others = [p for p in range(4) if p % count != i]
        torch.testing.assert_close(held.products[i], G.products[own].mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(rest.products[i], G.products[others].mean(0), rtol=0, atol=1e-12)


def test_the_gram_matrix_of_vectors_is_that_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "CHUNK", 7)
    full = ring_run(prompts=1)
    vectors = [vector.flatten() for vector in (*full.latents, *full.outputs)]
    expected = profile_run(full).inner[0]
    torch.testing.assert_close(gram_of(vectors), expected, rtol=0, atol=1e-12)


def test_the_spread_of_the_final_latents() -> None:
    x = torch.tensor([[1.0, 3.0], [2.0, 6.0]])
    stats = profile_run(Trajectory((torch.zeros(2, 2), x), (x,)))
    assert stats.final_spread == pytest.approx(math.sqrt((1 + 4) / 2))


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
    with pytest.raises(ValueError, match="same prompts and steps"):
        stats + stats.select([0])
    with pytest.raises(ValueError, match="elements must be positive"):
        replace(stats, elements=stats.elements * 0)
    with pytest.raises(ValueError, match=r"residual_norm must have shape \(P, T\)"):
        replace(stats, residual_norm=stats.residual_norm[0])
    with pytest.raises(ValueError, match="no elements"):
        profile_run(part(ring_run(), (slice(None), slice(0, 0))))


def part_of_steps(run: Trajectory, steps: int) -> Trajectory:
    return Trajectory(run.latents[: steps + 1], run.outputs[:steps])
