"""What ``attach`` refuses, warns of and replaces, and how its policy is found and let go again."""

from __future__ import annotations

import copy
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from ertacache.formats.policy import PolicyError
from ertacache.integration.attach import attach, detach, find_handle, summary
from ertacache.integration.record import record
from tests.hubserver import Hub
from tests.hubserver import hub as hub  # a fixture
from tests.integration.setting import COMPUTED, METHODS, STEPS, Setting, count_calls, watch_steps
from tests.integration.tiny import CASES, call_arguments


def test_policy_from_a_file(flux: Setting, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    flux.trajectory_policy().save(path)
    for given in (path, str(path)):
        with attach(flux.pipe, given) as handle:
            assert torch.equal(flux.generate(), flux.attached)
        assert handle.policy.default.compute_steps == COMPUTED
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(PolicyError, match="cannot load"):
        attach(flux.pipe, path)


def test_policy_from_the_hub(flux: Setting, hub: Hub) -> None:
    commit = hub.add("ada/policy", {"policy.safetensors": flux.trajectory_policy()._to_bytes()})
    for place in ("hub:ada/policy", f"hub:ada/policy@{commit}"):
        with attach(flux.pipe, place):
            assert torch.equal(flux.generate(), flux.attached)
    with pytest.raises(PolicyError, match="cannot load 'hub:ada/absent': there is no such repo"):
        attach(flux.pipe, "hub:ada/absent")


@pytest.mark.parametrize("target", [{}, {"speedup": 2.0}, {"compute_steps": 3}, {"min_psnr": 30.0}])
def test_other_number_of_steps_without_a_profile(setting: Setting, target: dict[str, Any]) -> None:
    """Refused before the network is evaluated, if the pipeline announces where the run begins."""
    with attach(setting.pipe, setting.trajectory_policy(), **target) as handle:
        with (
            count_calls(setting.pipe.transformer) as calls,
            pytest.raises(
                PolicyError,
                match=r"^the run has 5 steps, but the plan is for 8 and comes without a profile: "
                r"pass num_inference_steps=8, of which 5 are computed, or calibrate \w+ at these",
            ),
        ):
            setting.generate(num_inference_steps=5)
        announced = setting.case in (CASES["flux"], CASES["wan"])
        assert len(calls) == (0 if announced else 1)
        assert handle.plan is None
        assert handle.stats.last.computed_steps == 0


def test_other_sigmas_without_a_profile(flux: Setting) -> None:
    sigmas = torch.linspace(1, 0.05, STEPS).tolist()
    for method in METHODS:
        policy, expected = flux.policy_of(method)
        why = "comes without a profile" if method == "trajectory" else "is of the paper's method"
        with attach(flux.pipe, policy):
            with (
                count_calls(flux.pipe.transformer) as calls,
                pytest.raises(PolicyError, match=rf"is not the one of the plan, which {why}: lea"),
            ):
                flux.generate(sigmas=sigmas)
            assert not calls
            assert torch.equal(flux.generate(), expected)


def test_rounding_of_the_sigmas_is_no_difference(flux: Setting) -> None:
    sigmas = (torch.linspace(1, 1 / STEPS, STEPS) + 1e-6).tolist()
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        flux.generate(sigmas=sigmas)
    assert handle.stats.last.reused_steps == STEPS - len(COMPUTED)


def test_scheduler_of_another_prediction(wan: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's output would mean something else; another shift is another schedule."""
    policy, config = wan.trajectory_policy(), wan.pipe.scheduler.config
    other = {"use_flow_sigmas": False, "prediction_type": "epsilon"}
    wrong = UniPCMultistepScheduler.from_config(config, **other)
    monkeypatch.setattr(wan.pipe, "scheduler", wrong)
    with pytest.raises(PolicyError, match="prediction is 'epsilon', was 'flow'; attach it to the"):
        attach(wan.pipe, policy)
    shifted = UniPCMultistepScheduler.from_config(config, flow_shift=5.0)
    monkeypatch.setattr(wan.pipe, "scheduler", shifted)
    with attach(wan.pipe, policy), pytest.raises(PolicyError, match="comes without a profile"):
        wan.generate()


def test_wrong_pipeline_and_model(flux: Setting, wan: Setting, experts: Setting) -> None:
    with pytest.raises(PolicyError, match=r"denoiser is 'WanTransformer3DModel', was 'FluxTransf"):
        attach(wan.pipe, flux.trajectory_policy())
    with pytest.raises(PolicyError, match=r"denoiser_hash is .* or calibrate a new one"):
        attach(experts.pipe, wan.trajectory_policy())
    with pytest.raises(TypeError, match="needs a scheduler and one of transformer"):
        attach(object(), flux.trajectory_policy())  # type: ignore[arg-type]


def test_other_conditions_are_warned_of_once(
    flux: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """Another size is no reason for a warning: it is noted."""
    with attach(flux.pipe, flux.trajectory_policy()), caplog.at_level("INFO", logger="ertacache"):
        with pytest.warns(UserWarning, match=r"guidance_scale is 7\.0, was 3\.5$"):
            flux.generate(guidance_scale=7.0, height=48)
        assert caplog.messages == [
            "the run differs from the calibrated ones: latent_shape is (96, 16), was (64, 16)"
        ]
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
    other = flux.another()
    fast = other.paper_policy((0, 7))
    with attach(other.pipe, fast):
        second = other.generate()

    def meanwhile(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 3:
            assert torch.equal(other.generate(), second)
        return values

    with attach(flux.pipe, flux.trajectory_policy()) as a, attach(other.pipe, fast) as b:
        assert torch.equal(flux.generate(callback_on_step_end=meanwhile), flux.attached)
    assert a.stats.last.computed_steps == len(COMPUTED)
    assert b.stats.last.computed_steps == 2


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_held_after_a_run(flux: Setting, method: str) -> None:
    policy, _ = flux.policy_of(method)
    with attach(flux.pipe, policy):
        with watch_steps(flux.pipe) as seen:
            flux.generate()
            outputs = [weakref.ref(v) for v in seen.outputs]
            seen.outputs.clear(), seen.samples.clear(), seen.results.clear()
        assert all(v() is None for v in outputs)


def test_history_on_another_device(setting: Setting) -> None:
    for method in METHODS:
        policy, expected = setting.policy_of(method)
        with attach(setting.pipe, policy, cache_device="cpu"):
            assert torch.equal(setting.generate(), expected)


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
        pytest.raises(PolicyError, match=rf"another network at step {first}, which the plan reu"),
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


def attributes(pipe: Any) -> list[set[str]]:
    return [set(vars(part)) for part in (pipe, pipe.scheduler, pipe.transformer)]


def test_detach_needs_no_handle(flux: Setting) -> None:
    before = attributes(flux.pipe)
    attach(flux.pipe, flux.trajectory_policy())
    assert torch.equal(flux.generate(), flux.attached)
    assert detach(flux.pipe) is True
    assert attributes(flux.pipe) == before
    assert detach(flux.pipe) is False
    assert torch.equal(flux.generate(), flux.run.latents[-1])


def test_summary_needs_no_handle(flux: Setting) -> None:
    with pytest.raises(RuntimeError, match=r"no policy is attached.*call ertacache\.attach first"):
        summary(flux.pipe)
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        flux.generate()
        assert summary(flux.pipe) == handle.summary()
        assert summary(flux.pipe).startswith("last run: 5 of 8 steps computed: ██·█··██\n1 ")
    with pytest.raises(RuntimeError, match="no policy is attached"):
        summary(flux.pipe)


def test_handle_is_that_of_the_pipeline(flux: Setting) -> None:
    """Not of one that shares its network, nor of a copy, nor of a recording."""
    shared = type(flux.pipe)(**flux.pipe.components)
    shared.scheduler = copy.deepcopy(flux.pipe.scheduler)
    found: list[Any] = []

    def look(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        found.append(find_handle(pipe))
        return values

    assert find_handle(flux.pipe) is None
    record(flux.pipe, **call_arguments(flux.case, callback_on_step_end=look))
    assert found == [None] * STEPS
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        assert find_handle(flux.pipe) is handle
        assert find_handle(shared) is None
        assert detach(shared) is False
        assert find_handle(copy.deepcopy(flux.pipe)) is None
        assert find_handle(flux.pipe) is handle


def test_second_attach_replaces(flux: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """Reported in one line; the first handle keeps what it counted, and detaches nothing more."""
    before = attributes(flux.pipe)
    with caplog.at_level("WARNING", logger="ertacache"):
        first = attach(flux.pipe, flux.paper_policy((0, 7)))
        flux.generate()
        second = attach(flux.pipe, flux.trajectory_policy())
    (report,) = caplog.records
    assert (report.name, report.levelname) == ("ertacache", "WARNING")
    assert report.getMessage().startswith("replacing the attached policy: ")
    assert repr(second.policy) in report.getMessage()
    first.detach()
    assert find_handle(flux.pipe) is second
    assert torch.equal(flux.generate(), flux.attached)
    assert (first.stats.runs, first.stats.last.computed_steps) == (1, 2)
    assert (second.stats.runs, second.stats.last.computed_steps) == (1, len(COMPUTED))
    second.detach()
    assert attributes(flux.pipe) == before
    assert torch.equal(flux.generate(), flux.run.latents[-1])


def test_replacement_in_the_middle_of_a_run(flux: Setting) -> None:
    """The rest of that run is the scheduler's own; the new policy begins with the next."""

    def change(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 3:
            attach(pipe, flux.trajectory_policy())
        return values

    attach(flux.pipe, flux.paper_policy())
    with count_calls(flux.pipe.transformer) as calls:
        flux.generate(callback_on_step_end=change)
    assert len(calls) == sum(k <= 3 for k in COMPUTED) + STEPS - 4
    assert torch.equal(flux.generate(), flux.attached)
    assert detach(flux.pipe)


def test_policy_that_cannot_be_attached_replaces_nothing(
    flux: Setting, wan: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        with pytest.raises(PolicyError, match="calibrated for another pipeline"):
            attach(flux.pipe, wan.trajectory_policy())
        assert find_handle(flux.pipe) is handle
        assert torch.equal(flux.generate(), flux.attached)
    assert not caplog.records


def test_replacing_warns_once_of_other_conditions(flux: Setting) -> None:
    """Of the new policy, although it is checked before the old one is let go."""
    pipe = flux.another().pipe.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="dtype is"):
        attach(pipe, flux.trajectory_policy())
    with pytest.warns(UserWarning, match="dtype is") as seen:
        attach(pipe, flux.trajectory_policy((0, 4)))
    assert len(seen) == 1
    assert detach(pipe)
