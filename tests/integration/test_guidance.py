"""Guidance of every kind: what the scheduler sees is reused, so none has to be linear."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.formats.fingerprint import UNKNOWN, UNKNOWN_HASH
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.identity import fingerprint
from ertacache.integration.record import record
from tests.compatibility import image, newer, video
from tests.integration.reference import replayed
from tests.integration.sampling import Sampling, make
from tests.integration.setting import (
    COMPUTED,
    STEPS,
    Setting,
    fitted_plan,
    make_setting,
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
    facts = fingerprint(pipe, latent_shape=shape, guidance=full.guidance)
    return Policy(facts, plans=(fitted,))


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
    """Lumina 2 with ``cfg_trunc_ratio``: one call per step in the second half.

    No warning as calibrated; two if only the run has it.
    """
    pipe, call = build("Lumina 2", cfg_trunc_ratio=0.5)
    generate = run_of(pipe, call)
    policy = policy_of(pipe, call)
    with attach(pipe, policy) as handle:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate()
        assert handle.stats.last.denoiser_calls == 2 * 3 + 2  # steps 0, 1, 3 and 6, 7
        assert handle.stats.last.computed_steps == len(COMPUTED)
    pipe, call = build("Lumina 2")
    run_of(pipe, call)  # it sets the number of steps
    whole = policy_of(pipe, call)
    with attach(pipe, whole), pytest.warns(UserWarning, match="cfg_trunc_ratio is 0.5") as seen:
        run_of(pipe, call | {"cfg_trunc_ratio": 0.5})()
    assert "cfg_trunc_ratio is 0.5, was 1.0" in str(seen[0].message)
    assert "step 4 called the network 1 times" in str(seen[1].message)


def test_true_guidance_between_calls(flux: Setting) -> None:
    """Two calls per step in one run, one in the next: nothing of the first is left."""
    guided = {"true_cfg_scale": 2.0, "negative_prompt": "black"}
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        with pytest.warns(UserWarning, match=r"true_cfg_scale is 2\.0, was 1\.0"):
            strong = flux.generate(**guided)
        assert handle.stats.last.denoiser_calls == 2 * len(COMPUTED)
        assert not torch.equal(flux.attached, strong)
        assert torch.equal(flux.generate(), flux.attached)
        assert torch.equal(flux.generate(**guided), strong)


OTHER = "the policy was calibrated under other conditions: "


def differences(generate: Callable[..., Any], **changes: Any) -> list[str]:
    """What is reported of a run."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        generate(**changes)
    sentences = [str(warning.message) for warning in seen]
    return [text.removeprefix(OTHER) for text in sentences if text.startswith(OTHER)]


def test_true_cfg_scale_from_two_to_five() -> None:
    """Reported in whichever run it changes, once; the guidance that is embedded is another."""
    strong = make_setting("flux", true_cfg_scale=2.0, negative_prompt="black")
    assert strong.facts.guidance == {"guidance_scale": (3.5,), "true_cfg_scale": (2.0,)}
    with attach(strong.pipe, strong.trajectory_policy()):
        assert differences(strong.generate) == []
        found = differences(strong.generate, true_cfg_scale=5.0)
        assert found == ["true_cfg_scale is 5.0, was 2.0"]
        assert differences(strong.generate, true_cfg_scale=6.0) == []
        found = differences(strong.generate, true_cfg_scale=5.0, guidance_scale=2.0)
        assert found == ["guidance_scale is 2.0, was 3.5"]


def test_guidance_without_effect(flux: Setting) -> None:
    """Without a negative prompt: as calibrated, it is no difference."""
    idle = make_setting("flux", true_cfg_scale=4.0)
    with attach(idle.pipe, idle.trajectory_policy()):
        assert differences(idle.generate) == []
    with attach(flux.pipe, flux.trajectory_policy()):  # calibrated without the argument
        assert differences(flux.generate, true_cfg_scale=1.0) == []


def test_guidance_of_one_expert(experts: Setting) -> None:
    assert experts.facts.guidance == {"guidance_scale": (5.0,), "guidance_scale_2": (3.0,)}
    with attach(experts.pipe, experts.trajectory_policy((0, 1, 3, 4, 5, 6, 7))):
        assert differences(experts.generate) == []
        found = differences(experts.generate, guidance_scale_2=4.0)
        assert found == ["guidance_scale_2 is 4.0, was 3.0"]


class Unknown(Sampling):
    """A pipeline of one's own: its guidance is in no property."""

    def __init__(self) -> None:
        super().__init__(make("FlowMatchEulerDiscreteScheduler"))
        del self.guidance_scale

    def __call__(  # type: ignore[override]
        self, *, guidance_scale: float = 2.0, use_cfg: bool = False, **more: Any
    ) -> Tensor:
        given = {k: v for k, v in more.items() if k != "audio_guidance_scale"}
        return super().__call__(**given)


def test_guidance_of_a_pipeline_of_ones_own() -> None:
    """Its arguments, also those that it takes as keywords, and their defaults."""
    pipe = Unknown()
    full = record(pipe, audio_guidance_scale=3)
    assert full.guidance == {
        "audio_guidance_scale": (3.0,),
        "guidance_scale": (2.0,),
        "use_cfg": (0.0,),
    }
    facts = fingerprint(pipe, latent_shape=(3, 4), guidance=full.guidance)
    plan = trajectory_plan(full.schedule.nominal, COMPUTED)
    policy = Policy(facts, plans=(fitted_plan(plan, full.schedule),))
    with attach(pipe, policy):
        assert differences(pipe, audio_guidance_scale=3, guidance_scale=2) == []
        found = differences(pipe, audio_guidance_scale=4, use_cfg=True)
        assert found == ["audio_guidance_scale is 4.0, was 3.0, use_cfg is 1.0, was 0.0"]
    # One that the policy does not know is as calibrated if it has its default.
    with attach(pipe, replace(policy, fingerprint=replace(facts, guidance={}))):
        assert differences(pipe) == []
        assert differences(pipe, guidance_scale=2.5) == ["guidance_scale is 2.5, was 2.0"]


def test_the_cfg_of_a_policy_from_comfyui_is_compared_with_the_pipelines_scale() -> None:
    pipe = Unknown()
    full = record(pipe)
    facts = fingerprint(pipe, latent_shape=(3, 4), guidance={"cfg": (2.0,)})
    facts = replace(facts, denoiser=UNKNOWN, denoiser_hash=UNKNOWN_HASH)
    plan = trajectory_plan(full.schedule.nominal, COMPUTED)
    with attach(pipe, Policy(facts, plans=(fitted_plan(plan, full.schedule),))):
        assert differences(pipe, guidance_scale=2, use_cfg=True) == []
        assert differences(pipe, guidance_scale=7) == ["guidance_scale is 7.0, was 2.0"]


def test_a_loop_that_is_no_call_of_the_pipeline() -> None:
    """Its arguments are not known, the property is."""
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    full = record(sampling)
    assert full.guidance == {"guidance_scale": (1.0,)}

    def loop(scale: float) -> None:
        sampling.guidance_scale = scale
        scheduler, x = sampling.scheduler, full.run.latents[0]
        scheduler.set_timesteps(full.run.num_steps)
        for t in scheduler.timesteps:
            x = scheduler.step(sampling.unet(x, t), t, x).prev_sample

    policy = sampling.policy(trajectory_plan(full.schedule.nominal, COMPUTED))
    with attach(sampling, policy):
        assert differences(loop, scale=1.0) == []
        assert differences(loop, scale=2.0) == ["guidance_scale is 2.0, was 1.0"]
