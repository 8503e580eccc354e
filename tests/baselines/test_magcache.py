"""MagCache: its own calibration, and the same bits as through diffusers' own call."""

from __future__ import annotations

import ast

import pytest
import torch
from diffusers import MagCacheConfig

from ertacache.baselines import BaselineStats
from ertacache.baselines.magcache import MagCache
from tests.baselines.cases import BLOCKS, STEPS, Subject
from tests.baselines.direct import directly


def test_same_bits_as_used_directly(subject: Subject) -> None:
    baseline = MagCache().calibrate(subject.pipe, subject.runs)
    for threshold in (0.3, 100.0):
        config = baseline.config(subject.pipe, threshold, STEPS)
        expected = directly(subject.name, lambda pipe, c=config: c)
        with baseline.attach(subject.pipe, threshold, num_inference_steps=STEPS) as handle:
            assert torch.equal(subject.generate(), expected)
    # The first fifth, rounded to two steps, is computed; then five reused, one computed, one left.
    calls = BLOCKS * subject.branches
    assert handle.stats == BaselineStats("blocks", 3 * calls, (STEPS - 3) * calls)
    assert torch.equal(subject.generate(), subject.full_run)


def test_ratios_are_those_that_diffusers_prints(
    flux: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = MagCache().calibrate(flux.pipe, lambda: flux.generate(seed=1))
    assert capsys.readouterr().out == ""
    directly("flux", lambda pipe: MagCacheConfig(calibrate=True, num_inference_steps=STEPS), seed=1)
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert list(mine.ratios) == ast.literal_eval(printed)
    assert mine.ratios[0] == 1.0


def test_calibration_averages_runs_and_branches(wan: Subject) -> None:
    one = MagCache().calibrate(wan.pipe, lambda: wan.generate(seed=1)).ratios
    two = MagCache().calibrate(wan.pipe, lambda: wan.generate(seed=2)).ratios
    both = MagCache().calibrate(wan.pipe, wan.runs).ratios
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(one, two, strict=True)])
    assert torch.equal(wan.generate(), wan.full_run)


def test_missing_calibration_raises(flux: Subject) -> None:
    with pytest.raises(ValueError, match="calibrate it first"):
        MagCache().attach(flux.pipe, 0.1, num_inference_steps=STEPS)
    with pytest.raises(ValueError, match="no complete run"):
        MagCache().calibrate(flux.pipe, lambda: None)
