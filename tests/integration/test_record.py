"""The recorder sees the untouched run and changes nothing."""

from __future__ import annotations

import pytest
import torch

from ertacache.core.solver import run_reference
from ertacache.integration import record_run
from tests.integration.sampling import Sampling, make
from tests.integration.setting import STEPS, Setting


def test_records_what_the_pipeline_does(setting: Setting) -> None:
    """The record is of the untouched run, and does not decode."""
    arguments = setting.case.arguments | {"prompt": "a red circle moving left"}
    generator = torch.Generator().manual_seed(0)
    run, sigmas = record_run(
        setting.pipe,
        num_inference_steps=STEPS,
        generator=generator,
        max_sequence_length=8,
        **arguments,
    )
    assert torch.equal(sigmas, setting.sigmas)
    assert torch.equal(run.latents[-1], setting.generate())
    assert (len(run.latents), len(run.outputs)) == (STEPS + 1, STEPS)
    assert all(x.shape == run.latents[0].shape for x in (*run.latents, *run.outputs))


def test_record_of_a_flow_is_the_reference_run() -> None:
    """The Euler of core over the same network; its intervals are in float64, so not to the bit."""
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    run, sigmas = record_run(sampling)
    expected = run_reference(
        lambda x, sigma: sampling.unet(x, sigma.float() * 1000).detach(),
        run.latents[0],
        sigmas=sigmas,
    )
    for x, y in zip(run.latents, expected.latents, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_nothing_is_left_after_a_failed_record(flux: Setting) -> None:
    with pytest.raises(ValueError, match=r"Provide either `prompt`"):
        record_run(flux.pipe)
    assert "step" not in vars(flux.pipe.scheduler)
    assert torch.equal(flux.generate(), flux.run.latents[-1])
