"""Everything in a policy is shown, whatever it holds and lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ertacache.app.contents import frontier_html, policy_html
from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.fingerprint import Fingerprint, hash_config
from ertacache.formats.policy import FittedPlan, Policy, ValidationRow

SIGMAS = torch.linspace(1, 0, 5, dtype=torch.float64)


@pytest.fixture
def policy() -> Policy:
    """Plans only, measured."""
    run = Fingerprint(
        pipeline="FluxPipeline",
        denoiser="FluxTransformer2DModel",
        denoiser_hash=hash_config({}),
        prediction="flow",
        scheduler="FlowMatchEulerDiscreteScheduler",
        scheduler_config={"shift": 3.0},
        guidance={"guidance_scale": (3.5,)},
        dtype="float32",
        latent_shape=(16, 8, 8),
        versions={"torch": "2.13"},
    )
    coefficients = torch.cat([torch.ones(4, 1), SIGMAS.diff()[:, None]], dim=1)[:, None]
    rows = [ValidationRow("policy", 2, 46.5, 1.9, 24), ValidationRow("fewer steps", 2, 31, 1.9, 24)]
    plan = FittedPlan(TrajectoryPlan((0, 2), coefficients), SIGMAS, validation=rows)
    return Policy(run, plans=(plan,), provenance={"command": "<b>ertacache</b>"})


def test_a_policy_without_a_profile(policy: Policy) -> None:
    shown = policy_html(policy)
    for words in (
        "FluxPipeline",
        "shift=3.0",
        "guidance_scale 3.5",
        "16 x 8 x 8",
        "torch 2.13",
        "2 of 4 steps computed, 2.00x fewer",
        "Measured on 24 held-out prompts",
        "fewer steps",
        "46.5 dB",
        "recommended: 1.90x faster",
        "&lt;b&gt;ertacache&lt;/b&gt;",
        "it has no frontier",
    ):
        assert words in shown, words
    assert frontier_html(policy).count("<img") == 0


def test_a_plan_that_was_not_measured(policy: Policy) -> None:
    bare = replace(policy, plans=(replace(policy.plans[0], validation=()),))
    assert "Not measured on held-out prompts" in policy_html(bare)
