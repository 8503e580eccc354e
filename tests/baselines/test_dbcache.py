"""DBCache: the same bits as through cache-dit's own call, with and without a forecast."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from ertacache.baselines import BASELINES, BaselineStats
from ertacache.baselines.dbcache import DBCache
from ertacache.baselines.private_api import find_blocks
from tests.baselines.cases import BLOCKS, STEPS, Subject, build, run
from tests.baselines.toy import ToyPipe
from tests.integration.tiny import CASES

NAMES = ["DBCache", "DBCache + TaylorSeer", "DBCache + DMD", "DBCache + FoCa"]

installed = pytest.mark.skipif(
    importlib.util.find_spec("cache_dit") is None, reason="needs the extra bench"
)


@installed
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_used_directly(subject: Subject, name: str) -> None:
    import cache_dit

    baseline = BASELINES[name]
    assert isinstance(baseline, DBCache)
    fresh = build(subject.name)
    blocks = [block.module for block in find_blocks(subject.network)]
    for threshold in (0.3, 100.0):
        cache_dit.enable_cache(fresh, **baseline.config(fresh, threshold, STEPS))
        expected = run(fresh, CASES[subject.name])
        cache_dit.disable_cache(fresh)
        with baseline.attach(subject.pipe, threshold, num_inference_steps=STEPS) as handle:
            assert torch.equal(subject.generate(), expected)
    # Four steps of warm-up in full, then the first block alone.
    computed = (4 * BLOCKS + 4) * subject.branches
    total = STEPS * BLOCKS * subject.branches
    assert handle.stats == BaselineStats("blocks", computed, total - computed)
    assert torch.equal(subject.generate(), subject.full_run)
    assert [block.module for block in find_blocks(subject.network)] == blocks


@installed
def test_forecasts_are_other_results_and_kept(flux: Subject) -> None:
    results, cached = [], []
    for name in NAMES:
        with BASELINES[name].attach(flux.pipe, 100.0, num_inference_steps=STEPS) as handle:
            results.append(flux.generate())
        cached.append(handle.stats.cached_bytes)
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)
    assert min(cached[1:]) > cached[0]  # a history beyond the last residual
    assert cached[2] == max(cached)  # of up to six for DMD


@installed
def test_one_pipeline_of_a_class_at_a_time(flux: Subject) -> None:
    other = build("flux")
    with (
        DBCache().attach(flux.pipe, 0.3, num_inference_steps=STEPS),
        pytest.raises(RuntimeError, match="already enabled on a FluxPipeline"),
    ):
        DBCache().attach(other, 0.3, num_inference_steps=STEPS)
    assert torch.equal(run(other, CASES["flux"]), flux.full_run)


@installed
def test_unknown_pipeline_is_named() -> None:
    assert DBCache().applies(ToyPipe()) == "cache-dit has no adapter for ToyPipe"


def test_missing_library_is_named(flux: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = DBCache().applies(flux.pipe)
    assert reason == "cache-dit is not installed: pip install 'ertacache[bench]'"
