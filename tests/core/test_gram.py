"""Statistics of full runs: by hand, joined over prompts, added over pieces, resampled."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ertacache.core import gram
from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.gram import (
    Gram,
    RunStatistics,
    Schedule,
    Trajectory,
    close,
    fit_weights,
    gram_of,
    interpolation_rows,
    profile_run,
    resample,
    resample_response,
    run_rows,
)
from ertacache.core.sampler import Euler, SolverFactory, run_reference
from tests.core.rings import bench
from tests.core.solvers import AdamsBashforth, ddim, schedule_of


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


def grouped() -> tuple[Gram, Gram]:
    """The Gram matrices of four prompts, and those of their two groups of points."""
    full = ring_run()
    first, second = (profile_run(part(full, (slice(None), rows))).gram for rows in HALVES)
    products = torch.stack([first.products / 2, second.products / 2], dim=1)
    return profile_run(full).gram, Gram(products.flatten(0, 1), groups=2)


HALVES = (slice(0, 5), slice(5, 10))


def test_groups_of_a_prompt_follow_each_other_and_add_up() -> None:
    whole, divided = grouped()
    assert (divided.num_prompts, divided.num_steps, divided.size) == (4, 6, 13)
    torch.testing.assert_close(divided.by_prompt.sum(1), whole.products)
    mean = divided.mean()
    assert (mean.num_prompts, mean.groups) == (1, 2)
    torch.testing.assert_close(mean.by_prompt[0], divided.by_prompt.mean(0))
    rows = torch.randn(3, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    combined = divided.combined(rows)
    assert combined.groups == 2
    torch.testing.assert_close(combined.by_prompt.sum(1), whole.combined(rows).products)


def test_folds_keep_the_groups_of_a_prompt_together() -> None:
    whole, divided = grouped()
    for mine, all_of_it in zip(divided.folds(3)[:2], whole.folds(3)[:2], strict=True):
        assert (mine.groups, mine.num_prompts) == (2, 3)
        torch.testing.assert_close(mine.by_prompt.sum(1), all_of_it.products)
    torch.testing.assert_close(divided.folds(3)[0].by_prompt[1], divided.by_prompt[1])
    assert divided.folds(3)[2].tolist() == [2.0, 1.0, 1.0]


def test_the_rate_of_change_of_a_group_is_that_of_its_outputs_over_the_whole_latent() -> None:
    whole, divided = grouped()
    full, rate = ring_run(), divided.output_rate().view(4, 2, 6)
    for k in range(1, 6):
        v = (full.outputs[k] - full.outputs[k - 1]).square()
        x = (full.latents[k] - full.latents[k - 1]).square().flatten(1).sum(1)
        for group, rows in enumerate(HALVES):
            own = v[:, rows].flatten(1).sum(1)
            torch.testing.assert_close(rate[:, group, k], own / x, rtol=1e-9, atol=0)
    torch.testing.assert_close(rate.sum(1), whole.output_rate())


def test_weights_are_the_inverse_of_what_plain_reuse_costs() -> None:
    """One element, two steps: the second output differs from the first by 3, 1 and 0."""
    runs = torch.tensor([[4.0, 7.0], [4.0, 5.0], [4.0, 4.0]], dtype=torch.float64)
    start, nominal = torch.full((3, 1), 2.0).double(), torch.tensor([[1.0, -0.5], [1.0, -0.25]])
    latents = [start, start - 0.5 * runs[:, :1]]
    latents.append(latents[1] - 0.25 * runs[:, 1:])
    statistics = profile_run(Trajectory(tuple(latents), tuple(runs[:, :, None].unbind(1))))
    found = fit_weights(statistics.gram, nominal.double())
    assert found[:2].tolist() == pytest.approx([1 / 0.75**2, 1 / 0.25**2])
    # The third costs nothing: as much as a thousandth of its final latent, which is -1.
    assert found[2].item() == pytest.approx(1e6)


def test_weights_change_the_mean_but_no_geometric_mean() -> None:
    gram = Gram(torch.eye(3, dtype=torch.float64)[None] * torch.tensor([1.0, 4.0])[:, None, None])
    found = gram.weighted(torch.tensor([8.0, 2.0], dtype=torch.float64))
    assert found.squares[:, 0].tolist() == pytest.approx([2.0, 2.0])
    assert found.squares[:, 0].log().mean() == pytest.approx(gram.squares[:, 0].log().mean())
    divided = Gram(torch.ones(4, 3, 3, dtype=torch.float64), groups=2)
    found = divided.weighted(torch.tensor([8.0, 2.0], dtype=torch.float64))
    assert found.squares[:, 0].tolist() == pytest.approx([2.0, 2.0, 0.5, 0.5])


def test_rows_of_a_run_make_its_vectors_of_start_and_outputs() -> None:
    sigmas, full = shifted_sigmas(6), ring_run()
    whole = profile_run(full).gram
    few = torch.tensor([whole.x(0), *(whole.v(k) for k in range(6))])
    start_and_outputs = Gram(whole.products[:, few][:, :, few])
    made = start_and_outputs.combined(run_rows(schedule_of(sigmas)))
    torch.testing.assert_close(made.products, whole.products)


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


# Resampling


def test_combinations_by_hand() -> None:
    """The vectors (1, 0), (1, 1) and (0, 2): their sum has the square 1 / 2 (4 + 9)."""
    vectors = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    rows = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, -0.5], [2.0, 0.0, 0.0]], dtype=torch.float64)
    found = Gram(gram_of(list(vectors))[None]).combined(rows)
    assert found.products[0].tolist() == [[6.5, 1.0, 2.0], [1.0, 0.5, 1.0], [2.0, 1.0, 2.0]]


NODES = torch.tensor([1.0, 0.95, 0.7, 0.55, 0.5, 0.2, 0.05], dtype=torch.float64)


def powers(at: Tensor, degree: int) -> Tensor:
    return at[:, None] ** torch.arange(degree + 1)


def test_cubics_are_interpolated_exactly() -> None:
    at = torch.linspace(0.05, 1.0, 40, dtype=torch.float64)
    rows = interpolation_rows(NODES, at)
    torch.testing.assert_close(rows @ powers(NODES, 3), powers(at, 3), rtol=0, atol=1e-12)
    assert int((rows != 0).sum(1).max()) == 4
    assert (rows @ NODES**4 - at**4).abs().max() > 1e-5


def test_values_at_the_nodes_are_those_of_the_nodes() -> None:
    rows = interpolation_rows(NODES, NODES)
    torch.testing.assert_close(rows, torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-15)


def test_outside_of_the_nodes_it_goes_on_in_a_line() -> None:
    rows = interpolation_rows(NODES, torch.tensor([1.05, 0.0]))
    ends = torch.zeros(2, 7, dtype=torch.float64)
    ends[0, :2] = torch.tensor([2.0, -1.0])
    ends[1, 5:] = torch.tensor([-1 / 3, 4 / 3])
    torch.testing.assert_close(rows, ends, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_nodes_are_all_used(count: int) -> None:
    nodes, at = NODES[:count], NODES[:1] - 0.02
    found = interpolation_rows(nodes, at) @ powers(nodes, count - 1)
    torch.testing.assert_close(found, powers(at, count - 1), rtol=0, atol=1e-12)


def cubic(x: Tensor, sigma: Tensor) -> Tensor:
    """A network that is a polynomial of sigma alone: then resampling is exact."""
    waves = torch.arange(1, 9, dtype=torch.float64)
    return (waves.sin() - waves.cos() * sigma + waves * sigma**2 - sigma**3).expand_as(x)


@pytest.mark.parametrize("solver", [Euler, AdamsBashforth, ddim])
@pytest.mark.parametrize(("num_steps", "shift"), [(30, 3.0), (7, 3.0), (25, 3.0), (12, 1.5)])
def test_outputs_that_are_cubic_are_resampled_exactly(
    solver: SolverFactory, num_steps: int, shift: float
) -> None:
    noise = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = shifted_sigmas(30), shifted_sigmas(num_steps, shift)
    assert theirs[-2] >= ours[-2]  # nothing lies outside of the nodes
    profiled = profile_run(run_reference(cubic, noise, sigmas=ours)).gram
    full = run_reference(cubic, noise, sigmas=theirs, solver=solver)
    found = resample(profiled, schedule_of(ours), schedule_of(theirs, solver=solver))
    torch.testing.assert_close(found.products, profile_run(full).inner, rtol=0, atol=1e-12)


def relative_difference(a: Gram, b: Gram) -> float:
    """The largest over all products, in units of the vectors' lengths."""
    length = b.squares.sqrt()
    return float(((a.products - b.products).abs() / (length[:, None] * length[:, :, None])).max())


@pytest.mark.parametrize(
    ("num_steps", "shift", "solver"),
    [
        (20, 3.0, Euler),
        (50, 3.0, Euler),
        (30, 1.0, Euler),
        (30, 5.0, Euler),
        (20, 2.0, AdamsBashforth),
    ],
)
@pytest.mark.parametrize(
    ("radius", "width", "bound"), [(2.0, 0.3, 0.075), (4.0, 0.1, 0.11)], ids=["mild", "stiff"]
)
def test_runs_that_never_happened_are_close_to_those_that_do(
    num_steps: int, shift: float, solver: SolverFactory, radius: float, width: float, bound: float
) -> None:
    flow, sigmas = bench(radius, width, 30, 3.0), shifted_sigmas(num_steps, shift)
    full = run_reference(
        flow.flow.velocity, flow.reference.latents[0], sigmas=sigmas, solver=solver
    )
    found = resample(flow.gram, schedule_of(flow.sigmas), schedule_of(sigmas, solver=solver))
    assert relative_difference(found, profile_run(full).gram) < bound


def test_the_same_schedule_is_the_profile_itself() -> None:
    G, own = profile_run(ring_run()).gram, schedule_of(shifted_sigmas(6))
    assert resample(G, own, schedule_of(shifted_sigmas(6) * (1 - 1e-6))) is G
    moved = shifted_sigmas(6)
    moved[3] += 1e-3  # another run, and nearly the same one
    assert 1e-4 < (resample(G, own, schedule_of(moved)).products - G.products).abs().max() < 1e-2


def test_a_run_from_a_later_step_is_the_end_of_the_full_run() -> None:
    full, sigmas = ring_run(), shifted_sigmas(6)
    later = Trajectory(full.latents[2:], full.outputs[2:])
    found = resample(
        profile_run(full).gram, schedule_of(sigmas), schedule_of(sigmas[2:], begun=False)
    )
    torch.testing.assert_close(found.products, profile_run(later).inner, rtol=0, atol=1e-12)


def test_latents_of_another_scale() -> None:
    """As under a scheduler that scales the network's input: any run, from either profile."""
    own, G = schedule_of(shifted_sigmas(6)), profile_run(ring_run()).gram
    scale = torch.tensor([10.0, 8.0, 5.0, 3.0, 2.0, 1.5, 1.0], dtype=torch.float64)
    L = own.latents * scale[:, None]
    L[:, 0] /= scale[0]
    larger = replace(own, latents=L, scale=scale)
    scaled = G.combined(torch.cat([scale, torch.ones(6, dtype=torch.float64)]).diag())
    assert relative_difference(resample(G, own, larger), scaled) < 1e-12
    assert relative_difference(resample(scaled, larger, own), G) < 1e-12
    for run in (from_step(own, 4), from_step(larger, 4)):
        assert not run.begun
        ours, theirs = resample(G, own, run), resample(scaled, larger, run)
        assert relative_difference(ours, theirs) < 1e-12


def from_step(whole: Schedule, first: int) -> Schedule:
    """The later steps of a run of first order."""
    L = whole.latents[first:]
    return Schedule(
        whole.sigmas[first:],
        whole.nominal[first:],
        torch.cat([L[:, :1] / L[0, 0], L[:, 1 + first :]], dim=1),
        whole.scale[first:],
        begun=False,
    )


def test_what_is_the_same_run() -> None:
    own = schedule_of(shifted_sigmas(6))
    assert own.same_run(schedule_of(shifted_sigmas(6) * (1 + 1e-6)))
    assert own.num_steps == 6
    assert torch.equal(own.target, own.latents[-1])
    for other in (
        schedule_of(shifted_sigmas(7)),
        schedule_of(shifted_sigmas(6, 3.01)),
        schedule_of(shifted_sigmas(6), solver=AdamsBashforth),
        replace(own, begun=False),
    ):
        assert not own.same_run(other)
    assert not close(own.sigmas, own.sigmas * torch.nan)


def test_a_response_on_other_sigmas_is_on_straight_lines_between() -> None:
    own, other = schedule_of(shifted_sigmas(8, 1.0)), schedule_of(shifted_sigmas(6, 2.0))
    line = 3 * own.sigmas[:-1] - 1
    assert resample_response(line, own, own) is line
    found = resample_response(line, own, other)
    inside = other.sigmas[:-1] >= own.sigmas[-2]
    torch.testing.assert_close(found[inside], (3 * other.sigmas[:-1] - 1)[inside])
    later = schedule_of(shifted_sigmas(20, 1.0))  # its last steps are below those of the profile
    assert resample_response(line, own, later)[-1].item() == pytest.approx(line[-1].item())


def test_a_response_is_per_error_of_the_latent_in_its_own_scale() -> None:
    own = schedule_of(shifted_sigmas(6, 1.0))
    larger = replace(own, scale=own.scale * 5, latents=own.latents * 5)
    ones = torch.ones(6, dtype=torch.float64)
    assert resample_response(ones, own, larger).tolist() == pytest.approx([0.2] * 6)
    lone = schedule_of(shifted_sigmas(1))
    assert resample_response(ones[:1], lone, own).tolist() == pytest.approx([1.0] * 6)
