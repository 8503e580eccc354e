"""MeanCache: the update from latents, the shortest path, and costs known by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ertacache.baselines import BaselineStats
from ertacache.baselines.meancache import (
    Edge,
    MeanCache,
    deviation_weights,
    reuse_weights,
    shortest_path,
)
from tests.baselines.cases import STEPS, Subject, count
from tests.baselines.toy import ToyPipe

SIGMAS = [1.0, 0.9, 0.75, 0.6, 0.3, 0.0]


class VelocityPipe(ToyPipe):
    """Returns what the scheduler was given, read off the steps that it took."""

    def __call__(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        self.scheduler.set_timesteps(len(rows))
        sigmas, found = self.scheduler.sigmas, []
        for k, (row, t) in enumerate(zip(rows, self.scheduler.timesteps, strict=True)):
            v = sum(self.transformer(torch.tensor([x])) for x in row)  # as guidance combines
            after = self.scheduler.step(v, t, torch.zeros(1))[0]
            found.append([(after / (sigmas[k + 1] - sigmas[k])).item()])
        return found


@pytest.mark.parametrize("span", [1, 2, 3, 6])
def test_weights_are_the_published_update_from_latents(span: int) -> None:
    """An Euler run with velocities at random; the JVP is written with its latents."""
    torch.manual_seed(0)
    velocities, latents = list(torch.randn(5, 3, dtype=torch.float64)), [torch.zeros(3)]
    for k, v in enumerate(velocities):
        latents.append(latents[-1] + (SIGMAS[k + 1] - SIGMAS[k]) * v)
    for step in (1, 3, 4):
        r = max(0, step - span)
        passed = SIGMAS[step] - SIGMAS[r]
        average = (latents[step] - latents[r]) / passed
        jvp = (velocities[r] - average) / passed
        expected = velocities[step - 1] - (SIGMAS[step + 1] - SIGMAS[step]) * jvp
        weights = reuse_weights(SIGMAS, step, span)
        found = sum(
            (w * v for w, v in zip(weights, velocities[r:step], strict=True)), torch.zeros(3)
        )
        assert torch.allclose(found, expected)
        assert sum(weights) == pytest.approx(1)


def test_velocity_that_does_not_change_is_never_off() -> None:
    for start, stop, span in ((0, 3, 2), (2, 5, 6), (1, 2, 1)):
        assert sum(deviation_weights(SIGMAS, start, stop, span)) == pytest.approx(0)
    assert deviation_weights(SIGMAS, 1, 2, 4) == [0.0] * 5  # nothing reused


EDGES = (
    Edge(0, 1, 1, 0.0),
    Edge(0, 2, 1, 3.0),
    Edge(1, 2, 1, 0.0),
    Edge(0, 3, 1, 9.0),
    Edge(1, 3, 1, 4.5),
    Edge(2, 3, 1, 0.0),
    Edge(1, 4, 2, 5.0),
    Edge(2, 4, 1, 2.5),
    Edge(3, 4, 1, 1.0),
)


def test_power_of_the_costs_suppresses_peaks() -> None:
    """0-1-4 costs 5; 0-2-4 costs 3 + 2.5, in squares 15.25 against 25."""
    assert shortest_path(EDGES, 3, exponent=1.0) == (EDGES[0], EDGES[6])
    assert shortest_path(EDGES, 3, exponent=2.0) == (EDGES[1], EDGES[7])
    assert [edge.stop for edge in shortest_path(EDGES, 4, exponent=1.0)] == [1, 2, 4]
    assert [edge.stop for edge in shortest_path(EDGES, 5, exponent=1.0)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="no path computes 2 of 5 steps"):
        shortest_path(EDGES, 2, exponent=1.0)


def test_scheduler_is_given_the_average_velocity() -> None:
    """Computed are 0, 1 and 4; the sum of two branches, 16, 32, is carried on over a span of 2."""
    pipe = VelocityPipe()
    method = MeanCache(edges=EDGES, exponent=1.0)
    with method.attach(pipe, 3, num_inference_steps=5) as handle:
        found = pipe([[0.5, 0.5], [1.0, 1.0], [7.0, 7.0], [7.0, 7.0], [2.0, 1.0]])
    # Each goes a quarter of the last difference further, for the steps have one length.
    assert found == [pytest.approx([v], rel=1e-5) for v in (16.0, 32.0, 36.0, 37.0, 48.0)]
    assert handle.stats == BaselineStats("network calls", 6, 4)


def test_costs_of_full_runs_by_hand() -> None:
    """The velocity jumps once, at step 2: plain reuse over the jump is off by its share."""
    pipe = ToyPipe()
    rows = [[1.0], [1.0], [2.0], [2.0]]
    edges = {
        (edge.start, edge.stop): edge
        for edge in MeanCache().calibrate(pipe, lambda: pipe(rows)).edges
    }
    assert len(edges) == 6  # any two of four steps
    assert all(edges[k, k + 1].cost == 0 for k in range(3))
    assert edges[0, 2].cost == pytest.approx(0, abs=1e-6)  # reuses what is the same
    assert edges[1, 3].cost == pytest.approx(8.0)  # half of the edge is off by 16
    assert edges[0, 3].cost == pytest.approx(16 / 3)


def test_calibration_averages_runs(flux: Subject) -> None:
    one, two = (
        MeanCache().calibrate(flux.pipe, lambda s=seed: flux.generate(seed=s)) for seed in (1, 2)
    )
    both = MeanCache().calibrate(flux.pipe, flux.runs)
    costs = [{(e.start, e.stop, e.span): e.cost for e in m.edges} for m in (one, two, both)]
    shared = set(costs[0]) & set(costs[1]) & set(costs[2])
    assert shared
    for key in shared:
        assert costs[2][key] == pytest.approx((costs[0][key] + costs[1][key]) / 2)


def test_network_runs_on_the_path_only(any_subject: Subject) -> None:
    method = MeanCache().calibrate(any_subject.pipe, any_subject.runs)
    for budget in (2, 4):
        with (
            method.attach(any_subject.pipe, budget, num_inference_steps=STEPS) as handle,
            count(_head(any_subject)) as calls,
        ):
            assert not torch.equal(any_subject.generate(), any_subject.full_run)
        assert len(calls) == handle.stats.computed == budget * any_subject.branches
    with method.attach(any_subject.pipe, STEPS, num_inference_steps=STEPS):
        assert torch.equal(any_subject.generate(), any_subject.full_run)


def _head(subject: Subject) -> torch.nn.Module:
    name = "final_layer" if subject.name == "opensora" else "proj_out"
    module: torch.nn.Module = subject.network.get_submodule(name)
    return module


def test_what_cannot_be_attached_is_named(flux: Subject) -> None:
    with pytest.raises(ValueError, match="calibrate it first"):
        MeanCache().attach(flux.pipe, 4, num_inference_steps=STEPS)
    with pytest.raises(ValueError, match="no complete run"):
        MeanCache().calibrate(flux.pipe, lambda: None)
    with pytest.raises(ValueError, match="runs of 5 steps, not 8: calibrate it again"):
        MeanCache(edges=EDGES).attach(flux.pipe, 4, num_inference_steps=STEPS)
    with pytest.raises(ValueError, match="computed steps must be from 2 to 8"):
        MeanCache(edges=EDGES).attach(flux.pipe, 1, num_inference_steps=STEPS)


def test_long_runs_need_more_steps_than_two(flux: Subject) -> None:
    parameter = MeanCache().parameter(flux.pipe, num_inference_steps=50)
    assert parameter.low == 8  # seven edges of at most eight steps reach step 49
