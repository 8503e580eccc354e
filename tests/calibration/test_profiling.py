from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration import profile
from ertacache.calibration.profiling import number_runs, split_runs
from ertacache.core.gram import RunStatistics
from ertacache.formats.profile import Profile, ProfileError
from ertacache.integration import record_run
from tests.calibration.conftest import CALL, PROMPTS, STEPS

SHORT = CALL | {"num_inference_steps": 3}


class Counting:
    """A pipeline that counts the prompts it is called with, and may fail on one."""

    def __init__(self, pipe: Any, fail_on: str | None = None) -> None:
        self._pipe, self._fail_on = pipe, fail_on
        self.prompts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __call__(self, *, prompt: str | list[str], **call: Any) -> Any:
        texts = [prompt] if isinstance(prompt, str) else prompt
        if self._fail_on in texts:
            raise KeyboardInterrupt
        self.prompts += texts
        return self._pipe(prompt=prompt, **call)


def test_it_is_the_untouched_run_that_is_profiled(pipe: Any, known: Profile) -> None:
    generator = torch.Generator().manual_seed(2)
    run, sigmas = record_run(pipe, prompt=PROMPTS[2], generator=generator, **CALL)
    assert known.num_steps == STEPS
    assert torch.equal(known.sigmas, sigmas)
    square = run.latents[-1].double().square().mean().item()
    assert known.statistics.inner[2, STEPS, STEPS].item() == pytest.approx(square, rel=1e-4)
    assert known.nominal[:, 0].tolist() == [1.0] * STEPS
    assert torch.allclose(known.nominal[:, 1], sigmas.diff(), atol=1e-6)
    assert known.fingerprint.pipeline == "FluxPipeline"
    assert known.fingerprint.latent_shape == run.latents[0].shape[1:]


def test_it_tells_the_call_that_made_it(known: Profile, tmp_path: Path) -> None:
    assert set(known.provenance) == {"call", "ertacache"}
    assert "height=64, " in known.provenance["call"]
    assert f"num_inference_steps={STEPS}" in known.provenance["call"]
    known.save(tmp_path / "p.safetensors")
    assert Profile.load(tmp_path / "p.safetensors").provenance == known.provenance


def test_batches_do_not_matter(pipe: Any) -> None:
    one, three = (profile(pipe, PROMPTS[:3], batch_size=size, **SHORT) for size in (1, 3))
    assert one.prompts == three.prompts
    for field in fields(RunStatistics):
        a, b = getattr(one.statistics, field.name), getattr(three.statistics, field.name)
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4), field.name


def test_it_resumes_where_it_stopped(pipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    with pytest.raises(KeyboardInterrupt):
        profile(Counting(pipe, fail_on=PROMPTS[2]), PROMPTS[:4], path=path, **SHORT)
    assert Profile.load(path).num_prompts == 2
    again, seen = Counting(pipe), []
    whole = profile(again, PROMPTS[:4], path=path, progress=lambda *now: seen.append(now), **SHORT)
    assert again.prompts == PROMPTS[2:4]
    assert seen == [(3, 4), (4, 4)]
    straight = profile(pipe, PROMPTS[:4], **SHORT)
    assert torch.equal(whole.statistics.inner, straight.statistics.inner)
    idle = Counting(pipe)
    profile(idle, PROMPTS[:4], path=path, **SHORT)
    assert idle.prompts == []


def test_a_file_of_another_run_is_not_continued(pipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    profile(pipe, PROMPTS[:1], path=path, **SHORT)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="num_steps is 4, was 3"):
        profile(pipe, PROMPTS[:2], path=path, **(SHORT | {"num_inference_steps": 4}))
    with pytest.raises(ProfileError, match="num_steps is 4, was 3"):  # nothing to run is no excuse
        profile(pipe, PROMPTS[:1], path=path, **(SHORT | {"num_inference_steps": 4}))
    assert path.read_bytes() == before


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="list of at least one"):
        number_runs("a cat")
    with pytest.raises(ValueError, match="list of at least one"):
        number_runs([])
    with pytest.raises(ValueError, match="batch_size"):
        list(split_runs(number_runs(["a"]), 0))
