"""``merge``: the runs of several profiles, each once."""

from __future__ import annotations

from pathlib import Path

from ertacache.formats.profile import Profile
from tests.cli.conftest import STEPS, Refused, Run


def test_merge(tmp_path: Path, profile_file: Path, run: Run, refused: Refused) -> None:
    part, whole = tmp_path / "part.safetensors", tmp_path / "whole.safetensors"
    options = ["--limit", 1, "--steps", STEPS, "--seed", 100]
    assert run("profile", "emoji-flux", *options, "-o", part).exit_code == 0
    result = run("merge", profile_file, part, "-o", whole)
    assert result.stdout == f"{whole}: a profile of 4 runs of {STEPS} steps\n"
    assert [run.seed for run in Profile.load(whole).prompts] == [0, 1, 2, 100]
    before = whole.read_bytes()
    assert "share a run" in refused("merge", whole, part, "-o", whole)
    assert whole.read_bytes() == before
