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
