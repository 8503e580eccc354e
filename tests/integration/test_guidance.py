"""Guidance of every kind: what the scheduler sees is reused, so none has to be linear."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.identity import fingerprint
from ertacache.integration.record import record
from tests.compatibility import image, newer, video
from tests.integration.reference import replayed
from tests.integration.setting import (
    COMPUTED,
    STEPS,
    Setting,
    fitted_plan,
    trajectory_plan,
    watch_steps,
)

ROWS = {row.title: row for module in (image, newer, video) for row in module.ROWS}
GUIDANCE: dict[str, tuple[int, dict[str, Any]]] = {
    # The combined output gets the norm of the conditional one.
    "Qwen-Image": (2, {"true_cfg_scale": 4.0}),
    # Norms again; with a ratio below 1 the second call is left out on late steps.
    "Lumina 2": (2, {"guidance_scale": 4.0, "cfg_trunc_ratio": 1.0}),
    # The combined output gets part of the standard deviation of the conditional one.
    "LTX-Video": (1, {"guidance_scale": 4.0, "guidance_rescale": 0.7}),
}
"""Calls of the network per step, and the arguments that ask for them."""


def build(title: str, **guidance: Any) -> tuple[Any, dict[str, Any]]:
    row = ROWS[title]
    return row.build(), row.arguments() | GUIDANCE[title][1] | guidance


def run_of(pipe: Any, call: dict[str, Any]) -> Callable[[], Tensor]:
    def generate() -> Tensor:
        noise = torch.Generator().manual_seed(0)
        result: Tensor = pipe(**call | {"generator": noise})[0]
        return result

    call |= {"num_inference_steps": STEPS}
    return generate


def policy_of(pipe: Any, call: dict[str, Any]) -> Policy:
    full = record(pipe, **call | {"generator": torch.Generator().manual_seed(0)})
    shape = full.run.latents[0].shape[1:]
    plan = trajectory_plan(full.schedule.nominal, COMPUTED)
    fitted = fitted_plan(plan, full.schedule)
    return Policy(fingerprint(pipe, latent_shape=shape), plans=(fitted,))


@pytest.mark.parametrize("title", list(GUIDANCE))
def test_guidance_that_is_not_linear(title: str) -> None:
    """The plan's sums of what the scheduler saw, in the calls of the computed steps only."""
    pipe, call = build(title)
    generate = run_of(pipe, call)
    full, policy = generate(), policy_of(pipe, call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(pipe, policy) as handle, watch_steps(pipe) as seen:
            result = generate()
    assert torch.equal(result, replayed(policy.default, seen)[-1])
    assert not torch.equal(result, full)
    assert handle.stats.last.denoiser_calls == GUIDANCE[title][0] * len(COMPUTED)
    assert torch.equal(generate(), full)


def test_guidance_that_ends_early() -> None:
    """Lumina 2 with ``cfg_trunc_ratio``: one call per step in the second half, with a warning."""
    pipe, call = build("Lumina 2", cfg_trunc_ratio=0.5)
    generate = run_of(pipe, call)
    policy = policy_of(pipe, call)
    with attach(pipe, policy) as handle:
        with pytest.warns(UserWarning, match="step 4 called the network 1 times.* 2 times: a reu"):
            generate()
        assert handle.stats.last.denoiser_calls == 2 * 3 + 2  # steps 0, 1, 3 and 6, 7
        assert handle.stats.last.computed_steps == len(COMPUTED)


def test_true_guidance_between_calls(flux: Setting) -> None:
    """Two calls per step in one run, one in the next: nothing of the first is left."""
    guided = {"true_cfg_scale": 2.0, "negative_prompt": "black"}
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        strong = flux.generate(**guided)
        assert handle.stats.last.denoiser_calls == 2 * len(COMPUTED)
        assert not torch.equal(flux.attached, strong)
        assert torch.equal(flux.generate(), flux.attached)
        assert torch.equal(flux.generate(**guided), strong)
