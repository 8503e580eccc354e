"""The container: versions, what is not a policy file, the same bytes, atomic saving."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ertacache.formats.container import open_document, pack
from ertacache.formats.policy import Policy
from ertacache.formats.schema import FormatError, PolicyError
from tests.formats.golden.objects import FOLDER, golden_paper_policy, golden_policy
from tests.formats.mutations import dump, edited, join, split

OLD = "it has a format of before version 2, which this ertacache does not read: calibrate again"


def test_a_file_of_version_1_is_refused() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.load(FOLDER / "policy-v1.safetensors")
    assert str(caught.value) == f"cannot load '{FOLDER / 'policy-v1.safetensors'}': {OLD}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 1}, OLD),
        ({"version": 1, "format": "ertacache-profile"}, OLD),
        ({"version": 2, "format": "ertacache-profile"}, OLD),
        (
            {"version": 3, "later": "key"},
            "it has format version 3 and this ertacache reads version 2: upgrade ertacache",
        ),
        ({"version": 0}, "its format version is not a positive integer"),
        ({"version": True}, "its format version is not a positive integer"),
        ({"version": 2.0}, "its format version is not a positive integer"),
        ({"format": "ertacache"}, "it is not an ertacache policy"),
        ({"format": ["ertacache-policy"]}, "it is not an ertacache policy"),
    ],
)
def test_format_and_version_come_first(changes: dict[str, object], sentence: str) -> None:
    data = edited(golden_policy()._to_bytes(), changes)
    for damaged in (data, data[:-8]):  # before the tensors are looked at
        with pytest.raises(PolicyError) as caught:
            Policy._from_bytes(damaged, "memory")
        assert str(caught.value) == f"cannot load 'memory': {sentence}"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model")
    save_file({"weight": torch.ones(2)}, tmp_path / "other", metadata={"ertacache": "{}"})
    save_file({"weight": torch.ones(2)}, tmp_path / "umlaut", metadata={"ertacache": "ü"})
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not safetensors")
    (tmp_path / "short").write_bytes(b"\x09" + b"\x00" * 7 + b"{}")
    for name, sentence in (
        ("model", "not an ertacache file"),
        ("other", "it is not an ertacache policy"),
        ("umlaut", "its metadata 'ertacache' is not ASCII"),
        ("empty", "the file has 0 bytes, too few for the length of its header"),
        ("text", "the header claims [0-9]+ bytes, more than the limit of 4194304"),
        ("short", "the header claims 9 bytes, but the file ends after 2"),
    ):
        with pytest.raises(PolicyError, match=f"^cannot load '.*{name}': .*{sentence}"):
            Policy.load(tmp_path / name)


def test_the_checksum_covers_fields_and_tensors() -> None:
    data = golden_policy()._to_bytes()
    for damaged in (
        data[:-1] + bytes([data[-1] ^ 1]),
        data.replace(b"a red apple", b"a bad apple"),
    ):
        with pytest.raises(PolicyError, match="the checksum does not match: the file is damaged"):
            Policy._from_bytes(damaged, "memory")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('{"checksum"', '{ "checksum"', "does not begin with a checksum"),
        ('"checksum":"', '"checksum":null,"x":"', "does not begin with a checksum"),
        ('"checksum":"', '"checksum":"0', "does not have 64 digits"),
    ],
)
def test_the_checksum_stands_first(old: str, new: str, sentence: str) -> None:
    header, buffer = split(golden_policy()._to_bytes())
    text = header["__metadata__"]["ertacache"]
    header["__metadata__"]["ertacache"] = text.replace(old, new)
    with pytest.raises(PolicyError, match=sentence):
        Policy._from_bytes(join(dump(header), buffer), "memory")


def test_tensors_come_back_as_they_were_packed() -> None:
    tensors = {"a": torch.arange(6.0).double().view(2, 3), "b": torch.ones((), dtype=torch.float64)}
    shared = tensors | {"c": tensors["a"].T}
    data = pack({"x": 1, "y": 2}, tensors=shared)
    assert data == pack({"y": 2, "x": 1}, tensors=dict(reversed(shared.items())))
    document = open_document(BytesIO(data), len(data))
    assert document.fields == {"x": 1, "y": 2}
    found = document.read_tensors({"a": (2, 3), "b": (), "c": (3, 2)})
    assert all(torch.equal(found[name], value) for name, value in shared.items())


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({}, "it holds an unknown tensor 'a'"),
        ({"a": (2,), "b": (1,)}, "it lacks the tensor 'b'"),
        ({"a": (3,)}, r"it declares 'a' as .*\[2\].*, expected .*\[3\]"),
    ],
)
def test_tensors_other_than_expected_are_refused(
    shapes: dict[str, tuple[int, ...]], sentence: str
) -> None:
    data = pack({}, tensors={"a": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(FormatError, match=sentence):
        open_document(BytesIO(data), len(data)).read_tensors(shapes)


def test_a_tensor_section_of_another_size_is_refused() -> None:
    for change in (b"\x00" * 8, None):
        data = pack({}, tensors={"a": torch.zeros(2, dtype=torch.float64)})
        data = data[:-8] if change is None else data + change
        with pytest.raises(FormatError, match="the tensors take 16 bytes, but the file holds"):
            open_document(BytesIO(data), len(data)).read_tensors({"a": (2,)})


def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    data = golden_policy()._to_bytes()
    with pytest.raises(FormatError, match="the file became shorter while it was read"):
        open_document(BytesIO(data[:100]), len(data))


def test_missing_directory_pipe_and_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"cannot load '.*absent': No such file"):
        Policy.load(tmp_path / "absent")
    with pytest.raises(PolicyError, match="it is a directory, not a file"):
        Policy.load(tmp_path)
    with pytest.raises(PolicyError, match=r"cannot save .*: it is a directory, not a file"):
        golden_policy().save(tmp_path)
    with pytest.raises(PolicyError, match=r"cannot save .*: No such file"):
        golden_policy().save(tmp_path / "absent" / "p")
    with pytest.raises(PolicyError, match="null"):
        Policy.load("a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PolicyError, match="it is not a regular file"):
        Policy.load(tmp_path / "pipe")

    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(PolicyError, match=r"policy-v2.safetensors': Permission denied"):
        Policy.load(FOLDER / "policy-v2.safetensors")


def test_what_is_beyond_the_size_limits_is_neither_read_nor_written(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as stream:
        stream.truncate((256 << 20) + 1)
    with pytest.raises(PolicyError, match="268435457 bytes, more than the limit of 268435456"):
        Policy.load(tmp_path / "huge")
    wide = torch.zeros(1, dtype=torch.float64).expand((32 << 20) + 1)  # one number in memory
    with pytest.raises(FormatError, match="its tensors take 268435464 bytes, more than the limit"):
        pack({}, tensors={"a": wide})
    with pytest.raises(FormatError, match="use fewer or shorter prompts"):
        pack({"prompt": "x" * (4 << 20)}, tensors={})


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_save_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, failure: BaseException
) -> None:
    path = tmp_path / "p.safetensors"
    golden_policy().save(path)

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(broken, fail)
    expected = PolicyError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        golden_paper_policy().save(path)
    assert os.listdir(tmp_path) == ["p.safetensors"]
    assert path.read_bytes() == golden_policy()._to_bytes()


def test_save_replaces_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    golden_paper_policy().save(tmp_path / "link")
    golden_policy().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == golden_policy()._to_bytes()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
