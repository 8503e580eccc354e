"""Profiles: exact round trips, golden bytes, merging, refusals, atomic saving."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.formats.checks import FormatError
from ertacache.formats.fingerprint import Fingerprint, hash_config, hash_sigmas, plain_config
from ertacache.formats.profile import Profile, ProfiledPrompt, ProfileError
from tests.formats.golden.objects import (
    FOLDER,
    fingerprint,
    golden_known_profile,
    golden_profile,
    numbers,
    table,
)
from tests.formats.mutations import dump, join, seal, split

FIELDS = ("inner", "means", "residual_l1", "residual_norm", "output_l1", "output_norm", "elements")


def assert_same(a: Profile, b: Profile) -> None:
    assert a.fingerprint == b.fingerprint
    assert a.prompts == b.prompts
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
    path, profile = FOLDER / "profile-v2.safetensors", golden_known_profile()
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


def test_merged_profiles_tell_of_all_parts() -> None:
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
            replace(golden_profile(4, 1, first_seed=9), sigmas=table() * (1 + 1e-12)),
            "different sigma tables",
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
        ({"sigmas": table(5)}, r"sigmas must have shape \(5,\), got \(6,\)"),
        ({"sigmas": table().float()}, "sigmas must be float64, got float32"),
        ({"sigmas": table().flip(0)}, "sigmas must descend at every step, but entry 1"),
        ({"sigmas": table() * 2}, "not the table whose hash is in the fingerprint"),
        ({"sigmas": [1.0, 0.0]}, "sigmas must be a tensor, got list"),
        ({"nominal": numbers(4, 3)}, r"nominal must have shape \(4, 2\)"),
        ({"nominal": numbers(4, 2) / 0}, "nominal holds a number that is not finite"),
        ({"prompts": ()}, "1 to 10000 prompts, not 0"),
        ({"prompts": ("a", "b")}, "must hold ProfiledPrompt, not str"),
        ({"prompts": (ProfiledPrompt("a", 1),) * 2}, "'a' with seed 1 is there twice"),
        ({"prompts": (ProfiledPrompt("a", 1),)}, "statistics are of 2 prompts and 4 steps"),
        ({"statistics": None}, "statistics must be RunStatistics"),
        ({"fingerprint": None}, "fingerprint must be a Fingerprint"),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence):
        replace(golden_profile(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "seed"), [("a", -1), ("a", 2**63), ("a", True), ("\ud800", 0)])
def test_bad_prompt(prompt: str, seed: int) -> None:
    with pytest.raises(ProfileError):
        ProfiledPrompt(prompt, seed)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"denoiser_hash": "12"}, "denoiser_hash must be 64 hexadecimal digits"),
        ({"guidance": math.nan}, "guidance must be finite"),
        ({"num_steps": 0}, "num_steps must be from 1 to 10000"),
        ({"latent_shape": (0,)}, "latent_shape must be from 1"),
        ({"versions": {"torch": 2}}, "versions.torch must be a text"),
        ({"scheduler_config": {"a": {}}}, "use plain_config"),
        ({"scheduler_config": {"a": (math.inf,)}}, "scheduler_config.a must be finite"),
        ({"pipeline": ""}, "pipeline must not be empty"),
    ],
)
def test_bad_fingerprint(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        fingerprint(**changes)  # type: ignore[arg-type]


def test_compare_says_what_is_fatal() -> None:
    ours = fingerprint()
    assert ours.compare(ours) == []
    fatal = {
        "pipeline": "WanPipeline",
        "denoiser": "WanTransformer3DModel",
        "denoiser_hash": "0" * 64,
        "scheduler": "UniPCMultistepScheduler",
        "scheduler_config": {},
        "num_steps": 5,
        "sigmas_hash": "0" * 64,
    }
    mild = {"guidance": None, "dtype": "float16", "latent_shape": (3, 4, 4), "versions": {}}
    for name, value in (fatal | mild).items():
        found = ours.compare(replace(ours, **{name: value}))  # type: ignore[arg-type]
        assert found
        assert all(d.field.split(".")[0] == name and d.fatal == (name in fatal) for d in found)
    added = ours.compare(fingerprint(versions={**ours.versions, "numpy": "2.4"}))
    assert [str(d) for d in added] == ["versions.numpy is '2.4', was None"]
    extra = replace(ours, scheduler_config={**ours.scheduler_config, "beta": None})
    assert [d.field for d in ours.compare(extra)] == ["scheduler_config.beta"]
    assert [d.field for d in extra.compare(ours)] == ["scheduler_config.beta"]


def test_configurations() -> None:
    config = {"b": torch.ones(2), "a": (1, "x"), "c": {"d": [1]}, "_diffusers_version": "1"}
    plain = plain_config(config)
    assert plain == {"a": (1, "x"), "b": (1.0, 1.0), "c": '{"d":[1]}'}
    assert isinstance(fingerprint(scheduler_config=plain), Fingerprint)
    assert hash_config(config) == hash_config(dict(reversed(config.items())))
    with pytest.raises(FormatError, match="'a' is a dtype, which is not data"):
        plain_config({"a": torch.float32})
    assert hash_sigmas(table().float()) == hash_sigmas(table().float().double())


def test_missing_directory_pipe_and_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match=r"cannot load '.*absent': No such file"):
        Profile.load(tmp_path / "absent")
    with pytest.raises(ProfileError, match="it is a directory, not a file"):
        Profile.load(tmp_path)
    with pytest.raises(ProfileError, match=r"cannot save .*: it is a directory, not a file"):
        golden_profile().save(tmp_path)
    with pytest.raises(ProfileError, match=r"cannot save .*: No such file"):
        golden_profile().save(tmp_path / "absent" / "p")
    with pytest.raises(ProfileError, match="null"):
        Profile.load("a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="it is not a regular file"):
        Profile.load(tmp_path / "pipe")

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(ProfileError, match=r"profile-v1.safetensors': Permission denied"):
        Profile.load(FOLDER / "profile-v1.safetensors")


def test_file_beyond_the_size_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as stream:
        stream.truncate((256 << 20) + 1)
    with pytest.raises(ProfileError, match="more than the limit of 268435456"):
        Profile.load(tmp_path / "huge")


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_save_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, failure: BaseException
) -> None:
    path = tmp_path / "p.safetensors"
    golden_profile().save(path)

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(broken, fail)
    expected = ProfileError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        golden_profile(5, 1).save(path)
    assert os.listdir(tmp_path) == ["p.safetensors"]
    assert path.read_bytes() == golden_profile()._to_bytes()


def test_save_replaces_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    golden_profile(5, 1).save(tmp_path / "link")
    golden_profile().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(Profile.load(tmp_path / "real"), golden_profile())
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
