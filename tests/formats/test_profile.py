"""Profiles: exact round trips, golden bytes, merging, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.formats.profile import Profile, ProfiledPrompt, ProfileError
from tests.formats.golden.objects import (
    FOLDER,
    fingerprint,
    golden_profile,
    golden_traced_profile,
    numbers,
    schedule,
)
from tests.formats.mutations import dump, join, seal, split

FIELDS = ("inner", "means", "residual_l1", "residual_norm", "output_l1", "output_norm", "elements")


def assert_same(a: Profile, b: Profile) -> None:
    assert a.fingerprint == b.fingerprint
    assert a.prompts == b.prompts
    assert a.expert_steps == b.expert_steps
    assert a.provenance == b.provenance
    assert torch.equal(a.sigmas, b.sigmas)
    assert torch.equal(a.nominal, b.nominal)
    for name in FIELDS:
        assert torch.equal(getattr(a.statistics, name), getattr(b.statistics, name)), name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    for steps, prompts in ((4, 2), (1, 1), (7, 3)):
        profile = golden_profile(steps, prompts)
        profile.save(tmp_path / "p.safetensors")
        assert_same(Profile.load(tmp_path / "p.safetensors"), profile)
        assert Profile.load(str(tmp_path / "p.safetensors")).num_prompts == prompts


def test_golden_bytes() -> None:
    path = FOLDER / "profile-v1.safetensors"
    assert golden_profile()._to_bytes() == path.read_bytes()
    assert golden_profile()._to_bytes() == golden_profile()._to_bytes()
    assert_same(Profile.load(path), golden_profile())


def test_provenance_is_version_2(tmp_path: Path) -> None:
    path, profile = FOLDER / "profile-v2.safetensors", golden_traced_profile()
    assert profile._to_bytes() == path.read_bytes()
    assert_same(Profile.load(path), profile)
    assert Profile.load(path).provenance == profile.provenance
    assert Profile.load(FOLDER / "profile-v1.safetensors").provenance == {}
    bare = replace(profile, provenance={})
    assert bare._to_bytes() == golden_profile()._to_bytes()
    empty = seal_again(path, provenance={})
    with pytest.raises(ProfileError, match="without provenance has format version 1"):
        Profile._from_bytes(empty, "p")
    for bad in ({"version": 1}, {"provenance": {"call": 1}}, {"version": 3}):
        with pytest.raises(ProfileError, match=r"provenance|reads up to 2: upgrade"):
            Profile._from_bytes(seal_again(path, **bad), "p")


def seal_again(path: Path, **changes: object) -> bytes:
    """The file with other fields and a checksum that fits them."""
    header, buffer = split(path.read_bytes())
    fields = json.loads(header["__metadata__"]["ertacache"]) | changes
    del fields["checksum"]
    header["__metadata__"]["ertacache"] = seal(dump(fields), buffer)
    return join(json.dumps(header), buffer)


def test_merged_profiles_have_the_provenance_of_all_parts() -> None:
    first = replace(golden_profile(4, 2), provenance={"command": "one", "call": "steps=4"})
    second = replace(golden_profile(4, 1, first_seed=2), provenance={"command": "two"})
    third = replace(golden_profile(4, 1, first_seed=3), provenance={"command": "two"})
    merged = first.merge(second).merge(third)
    assert merged.provenance == {"call": "steps=4", "command": "one\ntwo"}


def test_fifty_steps_and_64_prompts_stay_under_five_megabytes() -> None:
    profile = golden_profile(50, 64)
    longest = tuple(ProfiledPrompt("ü" * 1000, k) for k in range(64))
    size = len(replace(profile, prompts=longest)._to_bytes())
    assert size < 5_000_000
    assert len(profile._to_bytes()) - 64 * 8 * 7902 < 16_384  # docs/formats.md states the sum


def test_prompts_beyond_the_header_limit_are_refused_on_save(tmp_path: Path) -> None:
    profile = replace(golden_profile(1, 1), prompts=(ProfiledPrompt("x" * (4 << 20), 0),))
    with pytest.raises(ProfileError, match="shorter prompts"):
        profile.save(tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def test_merge() -> None:
    first, second = golden_profile(4, 2), golden_profile(4, 3, first_seed=2)
    for merged in (first.merge(second), Profile.merge(first, second)):
        assert merged.prompts == first.prompts + second.prompts
        for name in FIELDS:
            parts = [getattr(part.statistics, name) for part in (first, second)]
            assert torch.equal(getattr(merged.statistics, name), torch.cat(parts))
    assert_same(first.merge(), first)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (golden_profile(), "share a run.*'a red apple' with seed 0"),
        (golden_profile(5, 1, first_seed=9), "different runs.*num_steps is 5, was 4"),
        (replace(golden_profile(4, 1, first_seed=9), nominal=numbers(4, 2)), "nominal updates"),
        (
            replace(golden_profile(4, 1, first_seed=9), sigmas=schedule() * (1 + 1e-12)),
            "different sigma schedules",
        ),
        (
            replace(golden_profile(4, 1, first_seed=9), fingerprint=fingerprint(guidance=1)),
            "guidance is 1.0, was 3.5",
        ),
    ],
)
def test_merge_refuses(other: Profile, sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence):
        golden_profile().merge(other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sigmas": schedule(5)}, r"sigmas must have shape \(5,\), got \(6,\)"),
        ({"sigmas": schedule().float()}, "sigmas must be float64, got float32"),
        ({"sigmas": schedule().flip(0)}, "sigmas must descend at every step, but entry 1"),
        ({"sigmas": schedule() * 2}, "not the schedule whose hash is in the fingerprint"),
        ({"sigmas": [1.0, 0.0]}, "sigmas must be a tensor, got list"),
        ({"nominal": numbers(4, 3)}, r"nominal must have shape \(4, 2\)"),
        ({"nominal": numbers(4, 2) / 0}, "nominal holds a number that is not finite"),
        ({"prompts": ()}, "1 to 10000 prompts, not 0"),
        ({"prompts": ("a", "b")}, "must hold ProfiledPrompt, not str"),
        ({"prompts": (ProfiledPrompt("a", 1),) * 2}, "'a' with seed 1 is there twice"),
        ({"prompts": (ProfiledPrompt("a", 1),)}, "statistics are of 2 prompts and 4 steps"),
        ({"statistics": None}, "statistics must be RunStatistics"),
        ({"expert_steps": (0, 2)}, "expert_steps must be from 1 to 3, got 0"),
        ({"expert_steps": (True,)}, "expert_steps must be an integer, got bool"),
        ({"fingerprint": None}, "fingerprint must be a Fingerprint"),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence):
        replace(golden_profile(), **changes)  # type: ignore[arg-type]


def test_expert_steps_are_kept_in_the_provenance_of_the_file(tmp_path: Path) -> None:
    for known in (golden_profile(), golden_traced_profile()):
        profile = replace(known, expert_steps=(3, 1, 3))
        assert profile.expert_steps == (1, 3)
        header, _ = split(profile._to_bytes())
        fields = json.loads(header["__metadata__"]["ertacache"])
        assert fields["version"] == 2
        written = {"first steps of networks": "0 1 3"}
        assert fields["provenance"] == dict(known.provenance) | written
        profile.save(tmp_path / "p")
        assert_same(Profile.load(tmp_path / "p"), profile)


def test_merged_profiles_compute_the_expert_steps_of_all_parts() -> None:
    first = replace(golden_profile(), expert_steps=(3,))
    second = replace(golden_profile(4, 1, first_seed=2), expert_steps=(1, 3))
    assert first.merge(second).expert_steps == (1, 3)


def test_expert_steps_that_are_not_numbers_are_refused() -> None:
    path = FOLDER / "profile-v2.safetensors"
    for bad, sentence in (
        (3, "networks must be a string, got int"),
        ("0 3.5", "must list step numbers"),
        ("0 -1", "must list step numbers"),
        ("0 123456", "must list step numbers"),
        ("0 4", "expert_steps must be from 1 to 3, got 4"),
    ):
        data = seal_again(path, provenance={"first steps of networks": bad})
        with pytest.raises(ProfileError, match=f"^cannot load 'p': .*{sentence}"):
            Profile._from_bytes(data, "p")


@pytest.mark.parametrize(("prompt", "seed"), [("a", -1), ("a", 2**63), ("a", True), ("\ud800", 0)])
def test_bad_prompt(prompt: str, seed: int) -> None:
    with pytest.raises(ProfileError):
        ProfiledPrompt(prompt, seed)
