"""One attached policy under the conditions of daily use, from call to call and side by side."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.formats.policy import PolicyError
from ertacache.integration.attach import attach
from tests.integration.setting import COMPUTED, METHODS, STEPS, Setting, count_calls, watch_steps
from tests.integration.tiny import generate


@pytest.mark.parametrize("method", METHODS)
def test_callback_that_edits_the_latent(flux: Setting, method: str) -> None:
    """The edited latent is the one that the next step goes on from, computed or reused."""

    def edit(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        return {"latents": values["latents"] + 0.5} if step in (1, 3) else values

    policy, plain = flux.policy_of(method)
    with attach(flux.pipe, policy):
        with watch_steps(flux.pipe) as seen:
            edited = flux.generate(callback_on_step_end=edit)
        assert torch.equal(flux.generate(), plain)
    samples, results = seen.samples, [result[0] for result in seen.results]
    for k in range(STEPS - 1):
        shift = 0.5 if k in (1, 3) else 0.0
        assert torch.equal(samples[k + 1], results[k] + shift)
    assert not torch.equal(edited, plain)


def test_several_images_per_prompt(flux: Setting) -> None:
    """A batch is its images one by one, each with its own noise."""
    with attach(flux.pipe, flux.trajectory_policy()) as handle:
        noise = [torch.Generator().manual_seed(seed) for seed in (0, 1, 2)]
        several = flux.generate(num_images_per_prompt=3, generator=noise)
        assert handle.stats.last.denoiser_calls == len(COMPUTED)
        single = torch.cat([flux.generate(seed=seed) for seed in (0, 1, 2)])
    torch.testing.assert_close(several, single, rtol=1e-3, atol=1e-3)


# Each after each: what a run leaves behind must not reach the next.
CHANGES: list[dict[str, Any]] = [
    {},
    {"height": 48, "width": 16},
    {"num_images_per_prompt": 2},
    {"guidance_scale": 1.5},
    {"prompt": ["a blue square", "a red circle", "a"]},
    {"true_cfg_scale": 2.0, "negative_prompt": "black"},
]


@pytest.mark.filterwarnings("ignore:the policy was calibrated under other conditions")
@pytest.mark.parametrize("method", METHODS)
def test_settings_change_between_calls(flux: Setting, method: str) -> None:
    """Every run is the one that a freshly attached policy gives, whatever ran before it."""
    policy, plain = flux.policy_of(method)
    fresh = [plain]
    for change in CHANGES[1:]:
        with attach(flux.pipe, policy):
            fresh.append(flux.generate(**change))
    with attach(flux.pipe, policy) as handle:
        for order in (range(len(CHANGES)), reversed(range(len(CHANGES)))):
            for i in order:
                assert torch.equal(flux.generate(**CHANGES[i]), fresh[i])
        with pytest.raises(PolicyError, match="has 5 steps"):
            flux.generate(num_inference_steps=5)
        assert torch.equal(flux.generate(), fresh[0])
    assert handle.stats.total.computed_steps == (2 * len(CHANGES) + 1) * len(COMPUTED)


def test_two_threads(flux: Setting) -> None:
    """A pipeline each, both attached: their runs do not influence each other."""
    other = flux.another()
    jobs = [(flux, flux.trajectory_policy()), (other, other.paper_policy())]
    expected = [flux.attached, flux.attached_paper]

    def work(job: Any) -> list[Tensor]:
        setting, policy = job
        with attach(setting.pipe, policy):
            return [setting.generate() for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        for results, right in zip(pool.map(work, jobs), expected, strict=True):
            assert all(torch.equal(result, right) for result in results)


def test_copy_of_an_attached_pipeline(flux: Setting) -> None:
    """It is not attached, its network is its own, and it can be attached like any other."""
    pipe, policy, expected = flux.another().pipe, flux.trajectory_policy(), flux.attached
    with attach(pipe, policy) as first:
        twin = copy.deepcopy(pipe)
        assert torch.equal(generate(twin, flux.case), flux.run.latents[-1])
        with attach(twin, policy) as second:

            def meanwhile(_: Any, step: int, timestep: Any, values: Any) -> Any:
                if step == 3:
                    assert torch.equal(generate(twin, flux.case), expected)
                return values

            result = generate(pipe, flux.case, callback_on_step_end=meanwhile)
            assert torch.equal(result, expected)
        assert (first.stats.runs, second.stats.runs) == (1, 1)
        with torch.no_grad():
            twin.transformer.proj_out.weight.mul_(2)
        assert not torch.equal(generate(twin, flux.case), flux.run.latents[-1])
        assert torch.equal(generate(pipe, flux.case), expected)
    with attach(twin, policy) as again, count_calls(twin.transformer) as calls:
        generate(twin, flux.case)
    assert len(calls) == len(COMPUTED) == again.stats.last.computed_steps


def test_saved_while_attached(flux: Setting, tmp_path: Path) -> None:
    """Byte for byte the folder of a pipeline without a policy."""
    folders = [tmp_path / "plain", tmp_path / "attached"]
    flux.pipe.save_pretrained(folders[0])
    with attach(flux.pipe, flux.paper_policy()):
        flux.generate()
        flux.pipe.save_pretrained(folders[1])
    files = [sorted(p.relative_to(f) for p in f.rglob("*") if p.is_file()) for f in folders]
    assert files[0] == files[1]
    assert len(files[0]) > 5
    for name in files[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_the_papers_method(flux: Setting, dtype: torch.dtype) -> None:
    """What is reused enters the scheduler's own step in the type of the pipeline's outputs."""
    pipe = flux.another().pipe.to(dtype)
    policy = flux.paper_policy(scale=1.0, rectified=False, reuse="velocity")
    with pytest.warns(UserWarning, match="dtype is"):
        handle = attach(pipe, policy)
    with handle, watch_steps(pipe) as seen:
        result = generate(pipe, flux.case)
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / STEPS, STEPS).tolist())
    x, v = seen.samples[0], seen.outputs[0]
    for k, t in enumerate(scheduler.timesteps):
        v = seen.outputs[k] if k in COMPUTED else v
        x = scheduler.step(v, t, x, return_dict=False)[0]
    assert result.dtype == dtype
    assert torch.equal(result, x)
