"""What ``attach`` refuses, warns of, counts, and leaves to others."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor, nn

from ertacache.core.plan import PaperPlan
from ertacache.formats.policy import PolicyError
from ertacache.integration import attach
from ertacache.integration.run import Run, move
from tests.integration.setting import (
    COMPUTED,
    STEPS,
    Setting,
    count_calls,
    make_setting,
    watch_steps,
)
from tests.integration.tiny import CASES


def test_policy_from_a_file(flux: Setting, tmp_path: Path) -> None:
    policy, path = flux.trajectory_policy(), tmp_path / "policy.safetensors"
    policy.save(path)
    with attach(flux.pipe, policy):
        expected = flux.generate()
    for given in (path, str(path)):
        with attach(flux.pipe, given) as handle:
            assert torch.equal(flux.generate(), expected)
        assert handle.policy.compute_steps == COMPUTED
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(PolicyError, match="cannot load"):
        attach(flux.pipe, path)


def test_wrong_number_of_steps(setting: Setting) -> None:
    with attach(setting.pipe, setting.trajectory_policy()) as handle:
        with (
            count_calls(setting.pipe.transformer) as calls,
            pytest.raises(
                PolicyError,
                match=r"has 5 steps, .* for 8: pass num_inference_steps=8, "
                r"of which 5 are computed, or run: ertacache calibrate MODEL --prompts prompts.txt "
                r"--steps 5 --compute-steps 4 -o policy-5.safetensors$",
            ),
        ):
            setting.generate(num_inference_steps=5)
        assert not calls
        assert handle.stats.runs == 0


def test_wrong_table(flux: Setting) -> None:
    table = torch.linspace(1, 0.05, STEPS).tolist()
    with (
        attach(flux.pipe, flux.trajectory_policy()),
        count_calls(flux.pipe.transformer) as calls,
        pytest.raises(PolicyError, match=r"sigma table is .* off the policy's"),
    ):
        flux.generate(sigmas=table)
    assert not calls


def test_rounding_of_the_table_is_no_difference(flux: Setting) -> None:
    table = (torch.linspace(1, 1 / STEPS, STEPS) + 1e-6).tolist()
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        flux.generate(sigmas=table)
    assert handle.stats.last.reused_steps == STEPS - len(COMPUTED)


def test_wrong_scheduler(wan: Setting) -> None:
    policy, mine = wan.trajectory_policy(), wan.pipe.scheduler
    wan.pipe.scheduler = UniPCMultistepScheduler.from_config(mine.config, flow_shift=5.0)
    try:
        with pytest.raises(PolicyError, match=r"scheduler_config\.flow_shift is 5\.0, was 3\.0"):
            attach(wan.pipe, policy)
    finally:
        wan.pipe.scheduler = mine


def test_wrong_pipeline_and_model(flux: Setting, wan: Setting, experts: Setting) -> None:
    with pytest.raises(PolicyError, match="pipeline is 'WanPipeline', was 'FluxPipeline'"):
        attach(wan.pipe, flux.trajectory_policy())
    with pytest.raises(PolicyError, match=r"denoiser_hash is .* or calibrate one for this"):
        attach(experts.pipe, wan.trajectory_policy())
    with pytest.raises(TypeError, match="needs a scheduler and one of transformer"):
        attach(object(), flux.trajectory_policy())  # type: ignore[arg-type]


def test_other_conditions_are_warned_of_once(flux: Setting) -> None:
    with attach(flux.pipe, flux.trajectory_policy()):
        with pytest.warns(UserWarning, match=r"guidance is 7\.0, was 3\.5") as seen:
            flux.generate(guidance_scale=7.0, height=48)
        assert "latent_shape is (96, 16), was (64, 16)" in str(seen[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flux.generate(guidance_scale=7.0, height=48)


@pytest.mark.filterwarnings("error")
def test_the_same_conditions_are_not(setting: Setting) -> None:
    with attach(setting.pipe, setting.trajectory_policy()) as handle:
        setting.generate()
    assert handle.stats.runs == 1


def test_other_batch_and_prompt(setting: Setting) -> None:
    """One policy serves any prompt, seed and batch: a batch is its prompts one by one."""
    prompts = ["a red circle", "a blue square"]
    with attach(setting.pipe, setting.trajectory_policy()):
        noise = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        both = setting.generate(prompt=prompts, generator=noise, **negative(setting, 2))
        single = [
            setting.generate(prompt=prompt, seed=seed, **negative(setting, 1))
            for prompt, seed in zip(prompts, (3, 4), strict=True)
        ]
    torch.testing.assert_close(both, torch.cat(single), rtol=1e-3, atol=1e-3)


def negative(setting: Setting, count: int) -> dict[str, Any]:
    return (
        {"negative_prompt": ["black"] * count}
        if "negative_prompt" in setting.case.arguments
        else {}
    )


def test_two_pipelines_at_once(flux: Setting) -> None:
    other = make_setting("flux")
    slow, fast = flux.trajectory_policy(), other.paper_policy((0, 7))
    with attach(flux.pipe, slow):
        first = flux.generate()
    with attach(other.pipe, fast):
        second = other.generate()

    def meanwhile(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 3:
            assert torch.equal(other.generate(), second)
        return values

    with attach(flux.pipe, slow) as a, attach(other.pipe, fast) as b:
        assert torch.equal(flux.generate(callback_on_step_end=meanwhile), first)
    assert a.stats.last.computed_steps == len(COMPUTED)
    assert b.stats.last.computed_steps == 2


def test_stats(setting: Setting) -> None:
    branches = 2 if setting.case is CASES["wan"] else 1
    latent = setting.run.latents[0].nbytes
    with attach(setting.pipe, setting.trajectory_policy()) as handle:
        assert handle.stats.runs == 0
        setting.generate()
        one = handle.stats
        setting.generate()
        two = handle.stats
    assert one.last == one.total
    assert (one.runs, one.last.computed_steps, one.last.reused_steps) == (1, len(COMPUTED), 3)
    assert one.last.denoiser_calls == branches * len(COMPUTED)
    assert one.last.denoiser_seconds > 0
    assert two.total == one.last + two.last
    assert two.runs == 2
    assert handle.stats == two  # also after detach
    # Three outputs of history, and the branches of guidance; Flux has none, so they are one.
    guided = 0 if setting.case is CASES["flux"] else 2
    assert one.last.cached_bytes == (3 + guided) * latent == two.total.cached_bytes


@pytest.mark.parametrize("method", ["trajectory", "paper"])
def test_nothing_is_held_after_a_run(flux: Setting, method: str) -> None:
    policy = flux.trajectory_policy() if method == "trajectory" else flux.paper_policy()
    with attach(flux.pipe, policy):
        with watch_steps(flux.pipe) as seen:
            flux.generate()
            outputs = [weakref.ref(v) for v in seen.outputs]
            seen.outputs.clear(), seen.samples.clear(), seen.results.clear()
        assert all(v() is None for v in outputs)


def test_history_on_another_device(setting: Setting) -> None:
    for policy in (setting.trajectory_policy(), setting.paper_policy()):
        with attach(setting.pipe, policy):
            expected = setting.generate()
        with attach(setting.pipe, policy, cache_device="cpu"):
            assert torch.equal(setting.generate(), expected)


def test_outputs_come_back_from_the_other_device() -> None:
    run, module = make_run(cache_device=torch.device("meta")), nn.Identity()
    run.start()
    run.enter(module)
    run.remember(0, {"sample": torch.ones(2)}, seconds=0.0)
    assert run.stats.last.cached_bytes == 8
    run.advance()
    run.enter(module)
    # What was on the meta device has no numbers to come back with: it tries, and that is seen.
    with pytest.raises(NotImplementedError, match="out of meta tensor"):
        run.replay(0)


def test_outputs_move_in_their_structure() -> None:
    x, meta = torch.ones(2), torch.device("meta")
    moved = move({"sample": [x, (x, None)]}, meta)
    assert moved["sample"][0].device == moved["sample"][1][0].device == meta
    assert isinstance(moved["sample"][1], tuple)
    assert moved["sample"][1][1] is None


def test_two_experts(experts: Setting) -> None:
    """Each begins with a computed step: the paper's method adds it, other plans must have it."""
    networks = (experts.pipe.transformer, experts.pipe.transformer_2)
    with count_calls(*networks) as calls:
        assert torch.equal(experts.generate(), experts.run.latents[-1])
    first = calls.count(networks[0]) // 2
    assert 1 < first < STEPS
    steps = (0, 1, STEPS - 1)
    assert first not in steps
    with (
        attach(experts.pipe, experts.trajectory_policy(steps)),
        pytest.raises(PolicyError, match=rf"another network at step {first}.*pinned=\[{first}\]"),
    ):
        experts.generate()
    with attach(experts.pipe, experts.trajectory_policy((0, 1, first))) as handle:
        experts.generate()
    assert handle.stats.last.computed_steps == 3
    policy = experts.paper_policy(steps, scale=1.0)
    with attach(experts.pipe, policy) as handle, count_calls(*networks) as calls:
        experts.generate()
    assert handle.stats.last.computed_steps == len(steps) + 1
    assert calls == 2 * [networks[0]] * 2 + 4 * [networks[1]]


def make_run(*, per_module: bool = False, cache_device: torch.device | None = None) -> Run:
    """Four steps of which the first is computed."""
    return Run(
        (0,),
        num_steps=4,
        per_module=per_module,
        cache_device=cache_device,
        held=list,
        check=lambda step: None,
    )


def test_calls_that_were_never_computed_are() -> None:
    """A reused step that calls the network more often than the computed one did."""
    run = make_run(per_module=True)
    a, b = nn.Identity(), nn.Identity()
    assert run.enter(a) is None  # outside a run
    run.start()
    assert run.enter(a) == 0
    assert not run.has(0)
    run.remember(0, "first", seconds=1.0)
    assert not run.advance()
    assert (run.enter(a), run.has(0), run.replay(0)) == (0, True, "first")
    assert (run.enter(b), run.has(1)) == (1, False)
    run.remember(1, "second", seconds=1.0)
    assert not run.advance()
    assert (run.enter(b), run.has(0)) == (0, False)  # another network: computed again
    run.remember(0, "third", seconds=1.0)
    assert not run.advance()
    assert (run.enter(b), run.replay(0)) == (0, "third")
    assert (run.enter(b), run.has(1)) == (1, False)  # of the first network, and gone with it
    assert run.advance()
    assert run.stats.last.computed_steps == 2
    assert run.stats.last.denoiser_calls == 3


def test_rectification_per_channel(flux: Setting) -> None:
    """One gain for every channel of the packed latent, in the dimension after the batch."""
    plan = flux.paper_policy().plan
    assert isinstance(plan, PaperPlan)
    assert plan.gain is not None
    assert plan.bias is not None
    wide = replace(
        plan,
        gain=plan.gain[:, None, None].repeat(1, 1, 16),
        bias=plan.bias[:, None, None].repeat(1, 1, 16),
    )
    results: list[Tensor] = []
    for policy in (flux.policy(plan), flux.policy(wide)):
        with attach(flux.pipe, policy):
            results.append(flux.generate())
    assert torch.equal(*results)
