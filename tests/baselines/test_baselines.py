"""All baselines alike: the registry, attach and detach, refusals, interrupted runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ertacache.baselines import BASELINES, Baseline, NotApplicableError, Parameter
from tests.baselines.cases import STEPS, Subject, attributes
from tests.integration.tiny import CASES

UNLISTED = ("FirstBlockCache", "MagCache", "TaylorSeer", "SeaCache")
DBCACHES = ("DBCache", "DBCache + TaylorSeer", "DBCache + DMD", "DBCache + FoCa")
UNKNOWN = ("FasterCache", *DBCACHES)
EXTRAPOLATIONS = ("extrapolation, order 1", "extrapolation, order 2")
ON_OUTPUTS = ("uniform", *EXTRAPOLATIONS, "Spectrum, on outputs", "MeanCache", "EasyCache")
NOT_APPLICABLE = {("flux", "T-GATE"), ("cogvideox", "T-GATE")} | {
    ("opensora", name) for name in UNLISTED + UNKNOWN
}
NAMES = list(BASELINES)


def bold(baseline: Baseline, subject: Subject) -> tuple[Parameter, float]:
    """A value with which every baseline reuses something in eight steps."""
    parameter = baseline.parameter(subject.pipe, num_inference_steps=STEPS)
    middle = {"computed share of blocks": 0.5, "reused blocks": 2, "timestep": 950.0}
    value = middle.get(parameter.name, parameter.high if parameter.saves else parameter.low)
    return parameter, value


_READY: dict[tuple[str, str], Baseline] = {}


def ready(name: str, subject: Subject) -> Baseline:
    baseline = BASELINES[name]
    if baseline.applies(subject.pipe) is not None:
        pytest.skip("not applicable")
    key = (name, subject.name)
    if key not in _READY:
        _READY[key] = baseline.calibrate(subject.pipe, subject.runs)
    return _READY[key]


def test_names() -> None:
    assert list(BASELINES) == [
        "fewer steps",
        "uniform",
        *EXTRAPOLATIONS,
        "TeaCache",
        "ertacache-paper (features)",
        "Delta-DiT",
        "ProfilingDiT",
        "T-GATE",
        "PAB",
        "FasterCache",
        "FirstBlockCache",
        "MagCache",
        "TaylorSeer",
        "SeaCache",
        *DBCACHES,
        "Spectrum",
        "Spectrum, on outputs",
        "MeanCache",
        "EasyCache",
    ]
    assert all(name == baseline.name for name, baseline in BASELINES.items())


@pytest.mark.parametrize("name", NAMES)
def test_where_they_apply(name: str, any_subject: Subject) -> None:
    reason = BASELINES[name].applies(any_subject.pipe)
    assert (reason is not None) == ((any_subject.name, name) in NOT_APPLICABLE)


@pytest.mark.parametrize("name", UNLISTED)
def test_blocks_that_diffusers_does_not_find(name: str, opensora: Subject) -> None:
    reason = "diffusers does not know where OpenSoraTransformer3DModel keeps its blocks"
    assert BASELINES[name].applies(opensora.pipe) == reason


@pytest.mark.parametrize("name", NAMES)
def test_detach_leaves_nothing(name: str, any_subject: Subject) -> None:
    baseline = ready(name, any_subject)
    before = attributes(any_subject.pipe)
    parameter, value = bold(baseline, any_subject)
    with baseline.attach(any_subject.pipe, value, num_inference_steps=STEPS) as handle:
        first = any_subject.generate()
        assert not torch.equal(first, any_subject.full_run)
        assert torch.equal(any_subject.generate(), first)  # the second run is the first one again
        assert handle.stats.reused > 0
        assert (handle.stats.cached_bytes == 0) == (name == "fewer steps")
    assert attributes(any_subject.pipe) == before
    assert torch.equal(any_subject.generate(), any_subject.full_run)
    with pytest.raises(ValueError, match=parameter.name):
        baseline.attach(any_subject.pipe, parameter.high + 1, num_inference_steps=STEPS)


@pytest.mark.parametrize("name", NAMES)
def test_interrupted_run_leaves_nothing(name: str, wan: Subject) -> None:
    def stop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return values

    baseline = ready(name, wan)
    _, value = bold(baseline, wan)
    if name == "fewer steps":
        value = 4
    with baseline.attach(wan.pipe, value, num_inference_steps=STEPS):
        expected = wan.generate()
        with pytest.raises(KeyboardInterrupt):
            wan.generate(callback_on_step_end=stop)
        assert torch.equal(wan.generate(), expected)
    with (
        pytest.raises(KeyboardInterrupt),
        baseline.attach(wan.pipe, value, num_inference_steps=STEPS),
    ):
        wan.generate(callback_on_step_end=stop)
    assert torch.equal(wan.generate(), wan.full_run)


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_another_prompt(name: str, flux: Subject) -> None:
    """Calibrated and attached once, it serves another prompt, seed and batch."""
    baseline = ready(name, flux)
    _, value = bold(baseline, flux)
    with baseline.attach(flux.pipe, value, num_inference_steps=STEPS):
        latents = flux.generate(prompt=["a blue square", "a red circle"], seed=3)
    assert latents.shape[0] == 2
    assert bool(torch.isfinite(latents).all())


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_named_or_served(name: str) -> None:
    pipe = CASES["wan-experts"].build()
    baseline = BASELINES[name]
    reason = baseline.applies(pipe)
    if name in ("fewer steps", *ON_OUTPUTS):
        assert reason is None
        return
    assert reason is not None
    assert "several networks" in reason
    with pytest.raises(NotApplicableError, match="several networks"):
        baseline.attach(pipe, 1, num_inference_steps=STEPS)


def test_copies_of_the_scheduler_are_not_attached(flux: Subject) -> None:
    with BASELINES["uniform"].attach(flux.pipe, 2, num_inference_steps=STEPS) as handle:
        copy.deepcopy(flux.pipe.scheduler).set_timesteps(3)
        assert handle.stats.computed == 0


def test_parameters_that_count_steps(flux: Subject) -> None:
    parameters = {
        name: baseline.parameter(flux.pipe, num_inference_steps=STEPS)
        for name, baseline in BASELINES.items()
    }
    counting = {name for name, parameter in parameters.items() if parameter.counts_steps}
    assert counting == {
        "fewer steps",
        "uniform",
        *EXTRAPOLATIONS,
        "ertacache-paper (features)",
        "TaylorSeer",
        "Spectrum",
        "Spectrum, on outputs",
        "MeanCache",
    }
    names = {parameter.name for parameter in parameters.values() if parameter.counts_steps}
    assert names == {"steps", "computed steps"}  # as results files have them
