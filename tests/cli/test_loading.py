"""Prompts and models that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

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
