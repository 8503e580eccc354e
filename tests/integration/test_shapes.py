"""Latents that change their shape within a run, or are not of the shape that a policy needs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.plans import PaperPlan
from ertacache.formats.policy import PolicyError
from ertacache.integration.attach import attach
from tests.integration.sampling import DETERMINISTIC, STEPS, Sampling, make
from tests.integration.setting import Setting, paper_plan, watch_steps
from tests.integration.test_warnings import PLANNED, policy_of

# One of the schedulers makes an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")


class Cropping(Sampling):
    """The latent loses a row before step ``at``."""

    at = STEPS

    @torch.no_grad()
    def __call__(self, *, start: int = 0, latents: Tensor | None = None, **_: Any) -> Tensor:
        self.scheduler.set_timesteps(STEPS)
        noise = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
        x = noise if latents is None else latents
        for k, t in enumerate(self.scheduler.timesteps[start:]):
            x = x[:, :2] if start + k == self.at else x
            x_in = x
            if hasattr(self.scheduler, "scale_model_input"):
                x_in = self.scheduler.scale_model_input(x, t)
            x = self.scheduler.step(self.unet(x_in, t), t, x).prev_sample
        return x


@pytest.mark.parametrize("name", list(DETERMINISTIC))
@pytest.mark.parametrize("at", [4, 5])
def test_latent_of_another_shape(name: str, at: int) -> None:
    """On a computed and on a reused step: from there on it is the scheduler's own run."""
    sampling = Cropping(make(name))
    policy = policy_of(sampling, "trajectory")
    with attach(sampling, policy) as handle:
        expected = sampling()
        sampling.at = at
        report = r"from \(2, 3, 4\) to \(2, 2, 4\) at step"
        with pytest.warns(UserWarning, match=report), watch_steps(sampling) as seen:
            result = sampling()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert torch.equal(sampling(), result)
        before = sum(k < at for k in PLANNED)
        assert handle.stats.last.computed_steps == before + STEPS - at
        sampling.at = STEPS
        assert torch.equal(sampling(), expected)
    own = sampling(start=at, latents=seen.samples[at])
    torch.testing.assert_close(result, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(DETERMINISTIC))
def test_latent_of_another_shape_with_the_papers_method(name: str) -> None:
    """The rest is computed on the plan's own sigmas; a multistep scheduler alone would fail.

    Such schedulers take the short steps at first order, where ``rest`` has none.
    """
    sampling = Cropping(make(name))
    _, sigmas = sampling.record()
    paper = paper_plan(sigmas, PLANNED)
    rest = replace(paper, compute_steps=(0, 1, 4, *range(5, STEPS)))
    sampling.at, results = 5, []
    for plan in (paper, rest):
        with attach(sampling, sampling.policy(plan)) as handle:
            with pytest.warns(UserWarning, match="rest of the run is computed"):
                results.append(sampling())
            assert handle.stats.last.computed_steps == 3 + STEPS - 5
    torch.testing.assert_close(*results, rtol=0.0, atol=1e-2 if "Multistep" in name else 0.0)


def test_rectification_of_another_size(flux: Setting) -> None:
    """One number per element cannot serve another resolution: refused before any step."""
    plan = flux.paper_policy().default.plan
    assert isinstance(plan, PaperPlan)
    assert plan.gain is not None
    assert plan.bias is not None
    wide = replace(
        plan,
        gain=plan.gain[:, None, None].repeat(1, 64, 16),
        bias=plan.bias[:, None, None].repeat(1, 64, 16),
    )
    with attach(flux.pipe, flux.policy(wide)), watch_steps(flux.pipe) as seen:
        with pytest.raises(PolicyError, match=r"shape \(64, 16\), the run has \(96, 16\)"):
            flux.generate(height=48)
        assert not seen.results
        flux.generate()
