from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.profile import profile
from ertacache.calibration.solve import solve
from ertacache.core.frontier import MeasuredFit
from ertacache.core.gram import RunStatistics
from ertacache.core.groups import ONE_GROUP, Groups, GroupStatistics
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.record import record
from ertacache.integration.solve import profile_of
from tests.calibration.conftest import (
    CALL,
    TINY_PROMPTS,
    TINY_STEPS,
    counting_rows,
    tiny_call,
)
from tests.formats.faults import full_disk, holding_lock
from tests.integration.tiny import CASES

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


def test_it_is_the_full_run_that_is_profiled(tiny: Any, tiny_known: Policy) -> None:
    generator, known = torch.Generator().manual_seed(2), profile_of(tiny_known)
    found = record(tiny, prompt=TINY_PROMPTS[2], generator=generator, **tiny_call())
    run, sigmas = found.run, found.schedule.sigmas
    assert known.num_steps == TINY_STEPS
    assert torch.equal(known.schedule.sigmas, sigmas)
    square = run.latents[-1].double().square().mean().item()
    last = known.statistics.inner[2, TINY_STEPS, TINY_STEPS].item()
    assert last == pytest.approx(square, rel=1e-4)
    assert known.schedule.nominal[:, 0].tolist() == [1.0] * TINY_STEPS
    assert torch.allclose(known.schedule.nominal[:, 1], sigmas.diff(), atol=1e-6)
    assert tiny_known.plans == ()
    assert tiny_known.fingerprint.pipeline == "FluxPipeline"
    assert tiny_known.fingerprint.latent_shape == run.latents[0].shape[1:]


def test_it_keeps_the_call_that_made_it(tiny_known: Policy, tmp_path: Path) -> None:
    known = tiny_known
    assert set(known.provenance) == {"call", "ertacache"}
    assert "height=32, " in known.provenance["call"]
    assert f"num_inference_steps={TINY_STEPS}" in known.provenance["call"]
    known.save(tmp_path / "p.safetensors")
    assert Policy.load(tmp_path / "p.safetensors").provenance == known.provenance


def test_batches_do_not_matter(pipe: Any) -> None:
    short = CALL | {"num_inference_steps": 3}
    one, three = (
        profile_of(profile(pipe, ["a red apple", "a dog", "a small car"], batch_size=size, **short))
        for size in (1, 3)
    )
    assert (one.runs, one.folds) == (three.runs, three.folds)
    for field in fields(RunStatistics):
        a, b = getattr(one.statistics, field.name), getattr(three.statistics, field.name)
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4), field.name


def by_group(policy: Policy) -> GroupStatistics:
    found = profile_of(policy).by_group
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "channels"), [("flux", 4), ("wan", 16), ("cogvideox", 4)])
def test_statistics_by_group_add_up_to_the_profile(name: str, channels: int) -> None:
    """In every fold, and for all latents, which are combinations of the start and the outputs."""
    pipe, call = CASES[name].build(), tiny_call(name) | {"num_inference_steps": 3}
    prompts = [*TINY_PROMPTS, *TINY_PROMPTS]  # the first two folds have two prompts each
    policy = profile(pipe, prompts, batch_size=10, **call)
    known, found = profile_of(policy), by_group(policy)
    inner = known.weights[:, None, None] * known.statistics.inner
    assert found.groups == known.finest == Groups(channels, bands=3)
    assert known.folds == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1)
    assert found.counts.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    kept = [0, 4, 5, 6]  # x_0, v_0, v_1, v_2
    for fold in range(8):
        runs = [place for place, mine in enumerate(known.folds) if mine == fold]
        expected = inner[runs][:, kept][:, :, kept].sum(0)
        torch.testing.assert_close(found.products[fold].sum(0), expected, rtol=1e-9, atol=1e-7)
    for groups in (found.groups, Groups(bands=3), Groups(channels), Groups(channels, bands=2)):
        gram = known.gram(groups)
        assert (gram.num_prompts, gram.groups) == (1, groups.count)
        torch.testing.assert_close(gram.products.sum(0), inner.mean(0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox"])
def test_statistics_by_group_are_the_same_for_every_batch_size(name: str, tmp_path: Path) -> None:
    pipe, call = CASES[name].build(), tiny_call(name) | {"num_inference_steps": 3}
    path, prompts = tmp_path / "profile.safetensors", TINY_PROMPTS
    expected = by_group(profile(pipe, prompts, batch_size=5, **call))
    profile(pipe, prompts[:2], path=path, **call)
    continued = profile(pipe, prompts, batch_size=2, path=path, **call)
    for policy in (profile(pipe, prompts, **call), continued, Policy.load(path)):
        found = by_group(policy)
        assert found.groups == expected.groups
        assert torch.equal(found.counts, expected.counts)
        torch.testing.assert_close(found.products, expected.products, rtol=1e-3, atol=1e-4)


def test_folds_hold_all_values_of_a_list(tiny: Any, tmp_path: Path) -> None:
    """In whatever order the values are run, and if the profile is continued."""
    path, call = tmp_path / "profile.safetensors", SHORT | {"guidance_scale": [2.0, 5.0]}
    prompts = [*TINY_PROMPTS, TINY_PROMPTS[0]]
    profile(tiny, prompts[:2], path=path, **call)
    policy = profile(tiny, prompts, batch_size=3, path=path, **call)
    known, values = profile_of(policy), dict[int, set[Any]]()
    for run, fold in zip(known.runs, known.folds, strict=True):
        assert fold == run.seed // 2
        values.setdefault(fold, set()).add(dict(run.arguments)["guidance_scale"])
    assert values == {fold: {2.0, 5.0} for fold in range(3)}
    assert by_group(policy).counts.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    for half in known.halves(known.runs):
        assert {dict(run.arguments)["guidance_scale"] for run in half} == {2.0, 5.0}


def test_latents_of_an_unknown_layout_have_no_groups(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is profiled; a policy is calibrated with one group, the second history with it."""
    monkeypatch.setattr("ertacache.integration.record.find_layout", lambda *_: None)
    call = {"heldout": TINY_PROMPTS[4:], "compute_steps": 2, "batch_size": 4} | SHORT
    guided = call | {"true_cfg_scale": 3.0, "negative_prompt": "black"}
    for arguments in (call, guided):
        policy = calibrate(tiny, TINY_PROMPTS[:4], **arguments)
        known, plan = profile_of(policy), policy.default.plan
        assert (known.by_group, known.finest) == (None, None)
        with pytest.raises(PolicyError, match="no statistics of 3 bands"):
            known.gram(Groups(bands=3))
        assert {fit.fit.groups for fit in policy.fits} == {ONE_GROUP}
        assert isinstance(plan, TrajectoryPlan)
        assert plan.groups == ONE_GROUP


def test_it_resumes_where_it_stopped(tiny: Any, tmp_path: Path) -> None:
    path, prompts = tmp_path / "profile.safetensors", TINY_PROMPTS[:4]
    with pytest.raises(KeyboardInterrupt):
        profile(Counting(tiny, fail_on=prompts[2]), prompts, path=path, **SHORT)
    assert profile_of(Policy.load(path)).num_runs == 2
    again, seen = Counting(tiny), []
    whole = profile(again, prompts, path=path, progress=lambda *now: seen.append(now), **SHORT)
    assert again.prompts == prompts[2:4]
    assert seen == [(3, 4), (4, 4)]
    straight = profile(tiny, prompts, **SHORT)
    gathered, made = (profile_of(policy).statistics.inner for policy in (whole, straight))
    assert torch.equal(gathered, made)
    idle = Counting(tiny)
    profile(idle, prompts, path=path, **SHORT)
    assert idle.prompts == []


def test_a_file_of_another_run_is_not_continued(tiny: Any, tmp_path: Path) -> None:
    path, sentence = tmp_path / "profile.safetensors", "num_inference_steps is 4, was 3"
    profile(tiny, TINY_PROMPTS[:1], path=path, **SHORT)
    before = path.read_bytes()
    with pytest.raises(PolicyError, match=sentence):
        profile(tiny, TINY_PROMPTS[:2], path=path, **(SHORT | {"num_inference_steps": 4}))
    with pytest.raises(PolicyError, match=sentence):  # nothing to run is no excuse
        profile(tiny, TINY_PROMPTS[:1], path=path, **(SHORT | {"num_inference_steps": 4}))
    with pytest.raises(PolicyError, match=r"guidance_scale is 5\.0, was 3\.5"):
        profile(tiny, TINY_PROMPTS[:2], path=path, **(SHORT | {"guidance_scale": 5.0}))
    assert path.read_bytes() == before


def test_plans_in_a_file_are_not_overwritten_by_more_runs(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    solve(profile(tiny, TINY_PROMPTS[:1], **SHORT), compute_steps=2).save(path)
    before = path.read_bytes()
    with counting_rows(tiny.transformer) as rows:
        with pytest.raises(PolicyError, match="holds fitted plans, which would be lost"):
            profile(tiny, TINY_PROMPTS[:2], path=path, **SHORT)
        same = profile(tiny, TINY_PROMPTS[:1], path=path, **SHORT)  # all of its runs are there
    assert rows == []
    assert len(same.plans) == 1
    assert path.read_bytes() == before


def test_a_policy_without_a_profile_is_not_continued(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    solved = solve(profile(tiny, TINY_PROMPTS[:1], **SHORT), compute_steps=2)
    Policy(solved.fingerprint, plans=solved.plans).save(path)
    with pytest.raises(PolicyError, match="no profile to be continued"):
        profile(tiny, TINY_PROMPTS[:2], path=path, **SHORT)


def test_several_images_per_prompt_are_refused(tiny: Any) -> None:
    with pytest.raises(PolicyError, match="1 prompts gave latents of a batch of 2: use batch_siz"):
        profile(tiny, TINY_PROMPTS[:1], num_images_per_prompt=2, **SHORT)


def test_prompts_are_spread_over_a_list_of_guidance(tiny: Any, tmp_path: Path) -> None:
    """Each with one of the values, in turn; a run is the one that the pipeline makes with it."""
    path, call = tmp_path / "profile.safetensors", SHORT | {"guidance_scale": [5.0, 2.0]}
    policy = profile(tiny, TINY_PROMPTS[:3], batch_size=3, path=path, **call)
    known = profile_of(policy)
    values = {run.prompt: dict(run.arguments)["guidance_scale"] for run in known.runs}
    assert values == dict(zip(TINY_PROMPTS[:3], [5.0, 2.0, 5.0], strict=True))
    assert policy.fingerprint.guidance == {"guidance_scale": (2.0, 5.0), "true_cfg_scale": (1.0,)}
    assert "guidance_scale=[5.0, 2.0]" in policy.provenance["call"]
    generator = torch.Generator().manual_seed(1)
    alone = SHORT | {"guidance_scale": 2.0, "generator": generator}
    run = record(tiny, prompt=TINY_PROMPTS[1], **alone).run
    place = [run.prompt for run in known.runs].index(TINY_PROMPTS[1])
    last = known.statistics.inner[place, 3, 3].item()
    assert last == pytest.approx(run.latents[-1].double().square().mean().item(), rel=1e-5)
    before = path.read_bytes()
    again = profile(tiny, TINY_PROMPTS[:3], path=path, **call)
    assert profile_of(again).runs == known.runs  # found in the file with their arguments
    assert path.read_bytes() == before


def test_two_processes_profile_into_one_file(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    profile(tiny, TINY_PROMPTS[:1], path=path, **SHORT)
    idle = Counting(tiny)
    with holding_lock(path) as other:
        for run, name, options in (
            (profile, "path", {}),
            (calibrate, "profile_path", {"compute_steps": 2}),
        ):
            with pytest.raises(ValueError, match=f"being written by process {other.pid} on"):
                run(idle, TINY_PROMPTS[:4], **{name: path}, **options, **SHORT)
        assert idle.prompts == []
        other.kill()  # as the system does without memory
        other.wait()
        assert profile_of(profile(tiny, TINY_PROMPTS[:2], path=path, **SHORT)).num_runs == 2
    assert list(tmp_path.iterdir()) == [path]


def test_the_runs_of_a_process_that_has_ended_are_kept(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote its runs after this one began, and before this one got the lock."""
    path, other = tmp_path / "profile.safetensors", profile(tiny, TINY_PROMPTS[:1], **SHORT)

    @contextmanager
    def slow(path: Path) -> Iterator[None]:
        other.save(path)
        yield

    monkeypatch.setattr("ertacache.calibration.profile.locked", slow)
    profile(tiny, TINY_PROMPTS[:2], path=path, **SHORT)
    assert profile_of(Policy.load(path)).num_runs == 2


def test_a_full_disk_leaves_the_runs_so_far(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    profile(tiny, TINY_PROMPTS[:1], path=path, **SHORT)
    before = path.read_bytes()
    with full_disk(), pytest.raises(PolicyError, match=f"cannot save '{path}': File too large"):
        profile(tiny, TINY_PROMPTS[:2], path=path, **SHORT)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_measured_fits_in_a_file_are_not_overwritten_by_more_runs(
    tiny: Any, tmp_path: Path
) -> None:
    path = tmp_path / "policy.safetensors"
    known = profile(tiny, TINY_PROMPTS[:1], **SHORT)
    replace(known, fits=(MeasuredFit(2, Fit(3), 1.5),)).save(path)
    before = path.read_bytes()
    with pytest.raises(PolicyError, match="holds measured fits, which would be lost"):
        profile(tiny, TINY_PROMPTS[:2], path=path, **SHORT)
    assert path.read_bytes() == before
