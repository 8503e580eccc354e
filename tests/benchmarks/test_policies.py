"""Policies that benchmarks share: made once, and again when something has changed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration.session import Session, number_runs
from tests.baselines.cases import count
from tests.integration.tiny import CASES


def test_a_policy_is_made_once(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = import_module("policies")
    case = CASES["flux"]
    call = {k: v for k, v in case.arguments.items() if k not in ("prompt", "output_type")}
    pipe, runs = case.build(), number_runs(["a", "b", "c"])
    pipe.set_progress_bar_config(disable=True)
    monkeypatch.setattr("ertacache.calibration.trial.SPEEDUPS", (2.0,))
    session = Session(pipe, call | {"num_inference_steps": 6}, batch_size=4)
    first = policies.calibrated(session, runs, speedups=[2.0])
    assert len(first.plans) == 1
    with count(pipe.transformer.proj_out) as calls:
        again = policies.calibrated(session, runs, speedups=[2.0])
        assert calls == []
        more = policies.calibrated(session, runs, speedups=[3.0])
        assert len(more.plans) == 2
        refit = len(calls)
        assert refit > 0
        policies.calibrated(session, runs[:2])
        assert len(calls) > refit  # other prompts
        tried = len(calls)
        next(pipe.transformer.parameters()).data.add_(1.0)
        policies.calibrated(session, runs[:2])
        assert len(calls) > tried  # other weights
    assert again.plans[0].compute_steps == first.plans[0].compute_steps
    assert len(list(Path(policies.FOLDER).iterdir())) == 3


def test_tests_keep_policies_elsewhere(benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    assert tmp_path / "policies" == import_module("policies").FOLDER
