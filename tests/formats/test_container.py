"""The container: kinds of files, what is not a file, the same bytes, atomic saving."""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ertacache.formats.container import open_document, pack, read_kind
from ertacache.formats.profile import Profile, ProfileError
from ertacache.formats.schema import FormatError
from tests.formats.golden.objects import FOLDER, GOLDEN, golden_profile
from tests.formats.mutations import dump, join, seal, split


@pytest.mark.parametrize("name", GOLDEN)
def test_the_kind_of_a_file_is_read_off_its_header(name: str, tmp_path: Path) -> None:
    kind = "profile" if name.startswith("profile") else "policy"
    assert read_kind(FOLDER / name) == kind
    assert read_kind(str(FOLDER / name)) == kind
    damaged = bytearray((FOLDER / name).read_bytes())
    damaged[-1] ^= 1  # the tensors are not read
    (tmp_path / "damaged").write_bytes(damaged)
    assert read_kind(tmp_path / "damaged") == kind


def test_a_file_of_neither_kind_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model")
    save_file({"weight": torch.ones(2)}, tmp_path / "other", metadata={"ertacache": "{}"})
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not safetensors")
    for name, sentence in (
        ("model", "not an ertacache file"),
        ("other", "neither an ertacache profile nor an ertacache policy"),
        ("empty", "too few for the length of its header"),
        ("text", "the header claims"),
        ("absent", "No such file"),
        (".", "it is a directory"),
    ):
        with pytest.raises(FormatError, match=f"^cannot load '.*': .*{sentence}"):
            read_kind(tmp_path / name)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    header, buffer = split((FOLDER / "policy-v1.safetensors").read_bytes())
    fields = json.loads(header["__metadata__"]["ertacache"]) | {"version": 2}
    del fields["checksum"]
    header["__metadata__"]["ertacache"] = seal(dump(fields), buffer)
    (tmp_path / "newer").write_bytes(join(dump(header), buffer))
    with pytest.raises(FormatError, match=r"version 2 .* reads up to 1: upgrade ertacache"):
        read_kind(tmp_path / "newer")


def test_tensors_come_back_as_they_were_packed() -> None:
    tensors = {"a": torch.arange(6.0).double().view(2, 3), "b": torch.ones((), dtype=torch.float64)}
    shared = tensors | {"c": tensors["a"].T}
    data = pack("policy", {"x": 1}, tensors=shared)
    assert data == pack("policy", {"x": 1}, tensors=dict(reversed(shared.items())))
    document = open_document(BytesIO(data), len(data))
    assert (document.kind, document.version, document.fields) == ("policy", 1, {"x": 1})
    found = document.read_tensors({"a": (2, 3), "b": (), "c": (3, 2)})
    assert all(torch.equal(found[name], value) for name, value in shared.items())


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({}, "an unknown tensor 'a'"),
        ({"a": (2,), "b": (1,)}, "lacks the tensor 'b'"),
        ({"a": (3,)}, "declares 'a' as"),
    ],
)
def test_tensors_other_than_expected_are_refused(
    shapes: dict[str, tuple[int, ...]], sentence: str
) -> None:
    data = pack("policy", {}, tensors={"a": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(FormatError, match=sentence):
        open_document(BytesIO(data), len(data)).read_tensors(shapes)


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
    assert (tmp_path / "real").read_bytes() == golden_profile()._to_bytes()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
