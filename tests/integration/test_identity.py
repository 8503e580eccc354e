"""What a pipeline is, and what is reported of a policy that was calibrated elsewhere."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from ertacache.integration.attach import attach
from ertacache.integration.identity import find_denoisers, fingerprint
from tests.integration.setting import Setting


def test_other_versions_are_reported_once(flux: Setting, caplog: pytest.LogCaptureFixture) -> None:
    policy = flux.trajectory_policy()
    ours = policy.fingerprint.versions
    series = ours["diffusers"].rpartition(".")[0]
    mild = ({"torch": "2.4.0"}, dict(ours) | {"diffusers": f"{series}.99"})
    with warnings.catch_warnings(), caplog.at_level("INFO", logger="ertacache"):
        warnings.simplefilter("error")
        for versions in mild:
            old = replace(policy, fingerprint=replace(policy.fingerprint, versions=versions))
            for _ in range(2):
                attach(flux.pipe, old).detach()
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "versions.torch is" in caplog.messages[0]
    assert f"was '{series}.99'" in caplog.messages[1]
    old = replace(
        policy,
        fingerprint=replace(policy.fingerprint, versions=dict(ours) | {"diffusers": "0.1.2"}),
    )
    with pytest.warns(UserWarning, match=r"versions\.diffusers is .* was '0\.1\.2'"):
        attach(flux.pipe, old).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(flux.pipe, old).detach()


def test_fingerprint_is_that_of_the_network_inside(flux: Setting) -> None:
    """``torch.compile`` wraps the network, and the policy is still for it."""
    pipe = flux.another().pipe
    shape = flux.run.latents[0].shape[1:]
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    now = fingerprint(pipe, latent_shape=shape)
    assert replace(now, guidance=flux.facts.guidance) == flux.facts


def test_fingerprint_covers_all_networks(wan: Setting, experts: Setting) -> None:
    assert list(find_denoisers(experts.pipe)) == ["transformer", "transformer_2"]
    assert list(find_denoisers(wan.pipe)) == ["transformer"]
    assert experts.facts.denoiser == wan.facts.denoiser
    assert experts.facts.denoiser_hash != wan.facts.denoiser_hash


def test_guidance_within_the_calibrated_range_is_no_difference(flux: Setting) -> None:
    """A policy may be calibrated with several values; only beyond them it is reported."""
    policy = flux.trajectory_policy()
    facts = replace(policy.fingerprint, guidance={"guidance_scale": (2.0, 5.0)})
    policy = replace(policy, fingerprint=facts)
    with warnings.catch_warnings(), attach(flux.pipe, policy):
        warnings.simplefilter("error")
        flux.generate(guidance_scale=3.5)
    with (
        attach(flux.pipe, policy),
        pytest.warns(UserWarning, match=r"guidance_scale is 7\.0, was 2\.0 to 5\.0"),
    ):
        flux.generate(guidance_scale=7.0)
