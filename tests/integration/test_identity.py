"""What is said of a policy that was made with other libraries."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from ertacache.integration import attach
from tests.integration.setting import Setting


def test_other_versions_are_told_once(flux: Setting, caplog: pytest.LogCaptureFixture) -> None:
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
