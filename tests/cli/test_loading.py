"""Prompts and models that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ertacache.cli import loading
from ertacache.cli.loading import MAX_LINE, read_prompts
from tests.cli.conftest import Refused, Variant


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xff\xfe\x00"])
def test_a_file_without_prompts(content: bytes, tmp_path: Path, refused: Refused) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    line = refused("profile", "emoji-flux", "--prompts", prompts, "-o", tmp_path / "p")
    assert str(prompts) in line


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("emoji-fluxx", "not a bundled model (emoji-flux"),
        ("nobody/nothing", "cannot load the pipeline 'nobody/nothing'"),
    ],
)
def test_an_unknown_model(
    model: str, words: str, tmp_path: Path, prompts_file: Path, refused: Refused
) -> None:
    path = tmp_path / "p.safetensors"
    assert words in refused("profile", model, "--prompts", prompts_file, "-o", path)
    assert "give a file with --prompts" in refused("profile", model, "-o", path)
    assert not path.exists()


def test_a_broken_folder_is_refused(
    tmp_path: Path, variant: Variant, prompts_file: Path, refused: Refused
) -> None:
    folder = variant()
    (folder / "transformer" / "config.json").unlink()
    line = refused("profile", folder, "--prompts", prompts_file, "-o", tmp_path / "p")
    assert "cannot load the pipeline" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{old}"],
        ["solve", "{old}", "--speedup", "2", "-o", "{new}"],
        ["merge", "{old}", "-o", "{new}"],
        ["refit", "{old}", "--speedup", "2"],
        ["generate", "emoji-flux", "a cat", "--policy", "{old}", "-o", "{new}"],
        ["profile", "emoji-flux", "-o", "{old}"],
        ["calibrate", "emoji-flux", "-o", "{old}"],
    ],
)
@pytest.mark.usefixtures("no_model")
def test_a_file_of_an_old_format(
    arguments: list[str], old_file: Path, tmp_path: Path, refused: Refused
) -> None:
    before, new = old_file.read_bytes(), tmp_path / "new.safetensors"
    line = refused(*(each.format(old=old_file, new=new) for each in arguments))
    assert str(old_file) in line
    assert "it has a format of before version 2" in line
    assert old_file.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_only_newlines_separate_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    breaks = "\u2028 \u2029 \x0b \x0c \x85 \x1c \r"
    path.write_bytes(f"\ufeff a{breaks}b\t\r\n\r\n\x0c\nc\u2028\n".encode())
    assert read_prompts(path) == [f"a{breaks}b", "c\u2028"]


def test_a_line_of_fifty_megabytes_is_refused(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"a cat\n" + b"x" * 50_000_000 + b"\na dog\n")
    line = refused("profile", "emoji-flux", "--prompts", path, "-o", tmp_path / "p")
    assert "line 2 has 50,000,000 characters, more than the limit of 10,000" in line
    path.write_text("x" * MAX_LINE)
    assert read_prompts(path) == ["x" * MAX_LINE]


def test_a_file_without_an_end_is_refused(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("no such file here")
    monkeypatch.setattr(loading, "MAX_FILE", 1 << 20)
    line = refused("profile", "emoji-flux", "--prompts", endless, "-o", tmp_path / "p")
    assert "'/dev/zero': it has more than 1 MB" in line


def test_a_hundred_thousand_prompts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    prompts = [f"a cat of number {k}" for k in range(100_000)]
    path.write_text("\n".join(prompts))
    assert read_prompts(path) == prompts
