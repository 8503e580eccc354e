from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration.profile import profile
from ertacache.core.gram import RunStatistics
from ertacache.formats.profile import Profile, ProfileError
from ertacache.integration.record import record
from tests.calibration.conftest import CALL, TINY_PROMPTS, TINY_STEPS, tiny_call

SHORT = tiny_call() | {"num_inference_steps": 3}


class Counting:
    """A pipeline that counts the prompts it is called with, and may fail on one."""

    def __init__(self, pipe: Any, fail_on: str | None = None) -> None:
        self._pipe, self._fail_on = pipe, fail_on
        self.prompts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __call__(self, *, prompt: str | list[str], **call: Any) -> Any:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if self._fail_on in prompts:
            raise KeyboardInterrupt
        self.prompts += prompts
        return self._pipe(prompt=prompt, **call)


def test_it_is_the_full_run_that_is_profiled(tiny: Any, tiny_profile: Profile) -> None:
    generator, known = torch.Generator().manual_seed(2), tiny_profile
    found = record(tiny, prompt=TINY_PROMPTS[2], generator=generator, **tiny_call())
    run, sigmas = found.run, found.sigmas
    assert known.num_steps == TINY_STEPS
    assert torch.equal(known.sigmas, sigmas)
    square = run.latents[-1].double().square().mean().item()
    last = known.statistics.inner[2, TINY_STEPS, TINY_STEPS].item()
    assert last == pytest.approx(square, rel=1e-4)
    assert known.nominal[:, 0].tolist() == [1.0] * TINY_STEPS
    assert torch.allclose(known.nominal[:, 1], sigmas.diff(), atol=1e-6)
    assert known.fingerprint.pipeline == "FluxPipeline"
    assert known.fingerprint.latent_shape == run.latents[0].shape[1:]


def test_it_keeps_the_call_that_made_it(tiny_profile: Profile, tmp_path: Path) -> None:
    known = tiny_profile
    assert set(known.provenance) == {"call", "ertacache"}
    assert "height=32, " in known.provenance["call"]
    assert f"num_inference_steps={TINY_STEPS}" in known.provenance["call"]
    known.save(tmp_path / "p.safetensors")
    assert Profile.load(tmp_path / "p.safetensors").provenance == known.provenance


def test_batches_do_not_matter(pipe: Any) -> None:
    short = CALL | {"num_inference_steps": 3}
    one, three = (
        profile(pipe, ["a red apple", "a dog", "a small car"], batch_size=size, **short)
        for size in (1, 3)
    )
    assert one.prompts == three.prompts
    for field in fields(RunStatistics):
        a, b = getattr(one.statistics, field.name), getattr(three.statistics, field.name)
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4), field.name


def test_it_resumes_where_it_stopped(tiny: Any, tmp_path: Path) -> None:
    path, prompts = tmp_path / "profile.safetensors", TINY_PROMPTS[:4]
    with pytest.raises(KeyboardInterrupt):
        profile(Counting(tiny, fail_on=prompts[2]), prompts, path=path, **SHORT)
    assert Profile.load(path).num_prompts == 2
    again, seen = Counting(tiny), []
    whole = profile(again, prompts, path=path, progress=lambda *now: seen.append(now), **SHORT)
    assert again.prompts == prompts[2:4]
    assert seen == [(3, 4), (4, 4)]
    straight = profile(tiny, prompts, **SHORT)
    assert torch.equal(whole.statistics.inner, straight.statistics.inner)
    idle = Counting(tiny)
    profile(idle, prompts, path=path, **SHORT)
    assert idle.prompts == []


def test_a_file_of_another_run_is_not_continued(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    profile(tiny, TINY_PROMPTS[:1], path=path, **SHORT)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="num_steps is 4, was 3"):
        profile(tiny, TINY_PROMPTS[:2], path=path, **(SHORT | {"num_inference_steps": 4}))
    with pytest.raises(ProfileError, match="num_steps is 4, was 3"):  # nothing to run is no excuse
        profile(tiny, TINY_PROMPTS[:1], path=path, **(SHORT | {"num_inference_steps": 4}))
    assert path.read_bytes() == before


def test_several_images_per_prompt_are_refused(tiny: Any) -> None:
    with pytest.raises(ProfileError, match="1 prompts gave latents of a batch of 2: use batch_siz"):
        profile(tiny, TINY_PROMPTS[:1], num_images_per_prompt=2, **SHORT)
