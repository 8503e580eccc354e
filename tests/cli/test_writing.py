"""Where results may go, how they are called, and the files themselves."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_IMODE

import numpy as np
import pytest
import torch
from PIL import Image

from ertacache.bench.journal import Journal
from ertacache.bench.results import write_results
from ertacache.bench.samples import Samples
from ertacache.cli.writing import find_destination, side_by_side, slug, write
from ertacache.formats.policy import Policy
from ertacache.metrics import encoding
from ertacache.metrics.files import lossy_codec, read_media
from ertacache.metrics.image import to_levels
from tests.cli.conftest import Refused, Run, T
from tests.formats.faults import full_disk, holding_lock


def test_the_destination_of_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    assert find_destination(tmp_path / "a.png", results=1, video=False).single
    assert not find_destination(tmp_path / "folder.png", results=1, video=False).single
    assert not find_destination(tmp_path / "v1.2", results=1, video=False).single
    for name, results, video in (
        ("a.png", 2, False),
        ("a.png", 1, True),
        ("a.mp4", 1, False),
        ("a.jpg", 1, False),
        ("file", 1, False),
    ):
        with pytest.raises(ValueError, match=name):
            find_destination(tmp_path / name, results=results, video=video)


@pytest.mark.parametrize("name", ["file/out", "file/a.png", "file/more/a.png"])
def test_generate_below_a_file_is_refused_before_any_run(
    name: str, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "file").write_text("mine")
    line = refused("generate", "emoji-flux", "a cat", "--steps", 2, "-o", tmp_path / name)
    assert f"{str(tmp_path / 'file')!r} is not a folder" in line


def test_generate_into_a_read_only_folder_is_refused_before_any_run(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write all
    for name in ("out", "a.png", "new/a.png"):
        line = refused("generate", "emoji-flux", "a cat", "--steps", 2, "-o", tmp_path / name)
        assert f"the folder {str(tmp_path)!r} cannot be written to" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["..", "/etc/passwd", "a" * 500, "", "con\0", "Ünï\u202e"])
def test_slugs_are_safe(text: str) -> None:
    assert slug(text).replace("-", "").isalnum()
    assert slug(text).isascii()
    assert len(slug(text)) <= 40


def test_side_by_side() -> None:
    full, fast = torch.zeros(3, 2, 2), torch.full((3, 2, 2), 0.1)
    row = side_by_side(full, fast)
    column = row.shape[-1] // 3
    found = [row[:, -2:, place : place + 2] for place in (0, column, 2 * column)]
    assert torch.equal(found[0], full)
    assert torch.equal(found[1], fast)
    assert found[2].flatten().tolist() == pytest.approx([0.8] * 12)
    assert row[:, :-2].min() == 0  # the labels
    assert torch.equal(side_by_side(full[None], fast[None])[0], row)  # a video of one frame


@pytest.mark.parametrize("size", [(16, 32), (19, 35)])
def test_a_lossless_video_keeps_every_level(tmp_path: Path, size: tuple[int, int]) -> None:
    pytest.importorskip("imageio_ffmpeg")
    video = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0))
    write(video, tmp_path / "a.mp4", lossless=True)
    write(video, tmp_path / "b.mp4")
    assert torch.equal(read_media(tmp_path / "a.mp4"), to_levels(video) / 255)
    assert lossy_codec(tmp_path / "a.mp4") is None
    assert lossy_codec(tmp_path / "b.mp4") == "h264"


def test_a_video_of_odd_size_and_a_result_that_is_not_a_number(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    write(torch.rand(3, 3, 19, 35), tmp_path / "odd.mp4")
    assert (tmp_path / "odd.mp4").stat().st_size > 0
    write(torch.full((3, 4, 4), torch.nan), tmp_path / "nan.png")
    assert np.asarray(Image.open(tmp_path / "nan.png")).max() == 0


def test_no_other_file_is_overwritten(tmp_path: Path, policy_file: Path, refused: Refused) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert "will not overwrite" in refused("profile", "emoji-flux", "-o", notes)
    assert notes.read_text() == "mine"
    before, options = policy_file.read_bytes(), ["--limit", 4, "--steps", T]
    line = refused("profile", "emoji-flux", *options, "-o", policy_file)
    assert "holds fitted plans, which would be lost" in line
    assert policy_file.read_bytes() == before
    assert "it is a folder" in refused("profile", "emoji-flux", "-o", tmp_path)
    assert "there is no folder" in refused("profile", "emoji-flux", "-o", tmp_path / "a" / "b")


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_an_image_or_a_video_on_a_full_disk(name: str, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path, shape = tmp_path / name, (3, 64, 64) if name == "a.png" else (9, 3, 64, 64)
    torch.manual_seed(0)
    for left in ([], [path]):
        with full_disk(), pytest.raises(OSError, match=name) as caught:
            write(torch.rand(shape), path)
        assert caught.value.filename == str(path)
        assert list(tmp_path.iterdir()) == left
        write(torch.zeros(shape), path)
        before = path.read_bytes()
    with full_disk(), pytest.raises(OSError, match=name):
        write(torch.rand(shape), path)
    assert path.read_bytes() == before


def test_a_video_that_ffmpeg_cannot_write_says_why(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(OSError, match="64x0") as caught:
        write(torch.rand(2, 3, 0, 64), tmp_path / "a.mp4")
    assert caught.value.strerror is not None
    assert not caught.value.strerror.startswith("[")
    assert list(tmp_path.iterdir()) == []


def test_a_video_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ffmpeg prints if not even the header of the file has space."""
    lines = (
        "[out#0/mp4 @ 0x2b] Could not write header: No space left on device",
        "[out#0/mp4 @ 0x2b] Nothing was written into output file",
    )
    program = tmp_path / "ffmpeg"
    program.write_text(
        "#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 228"
    )
    program.chmod(0o755)
    monkeypatch.setattr(encoding, "check_video_writer", lambda: str(program))
    with pytest.raises(OSError, match="No space left on device"):
        write(torch.rand(2, 3, 8, 8), tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == [program]


def test_generate_on_a_full_disk_leaves_no_truncated_image(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "apple.png"
    with full_disk():
        result = run("generate", "emoji-flux", "a red apple", "--steps", 2, "-o", path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"error: {str(path)!r}: File too large"
    assert list(tmp_path.iterdir()) == []


def test_solve_on_a_full_disk_leaves_the_old_policy(
    profile_file: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "policy.safetensors"
    path.write_bytes(profile_file.read_bytes())
    with full_disk():
        result = run("solve", profile_file, "--speedup", 2, "-o", path)
    assert result.exit_code == 2
    message = f"error: cannot save {str(path)!r}: File too large"
    assert result.stderr.splitlines()[-1] == message
    assert path.read_bytes() == profile_file.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_result_files_have_equal_permissions(umask: int, tmp_path: Path, policy_file: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    before = os.umask(umask)
    try:
        write(torch.zeros(3, 8, 8), tmp_path / "a.png")
        write(torch.zeros(2, 3, 8, 8), tmp_path / "a.mp4")
        write_results(tmp_path / "a.json", {}, [])
        Journal(tmp_path / "a.journal.jsonl", {})
        samples = Samples(tmp_path / "a.samples.safetensors")
        samples.add("full", 1.0, torch.zeros(1, 3, 8, 8))
        samples.save(["a cat"])
        Policy.load(policy_file).save(tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    modes = {path.name: S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert len(modes) == 6


COMMANDS = {
    "profile": ["profile", "emoji-flux", "-o", "{mine}"],
    "calibrate": ["calibrate", "emoji-flux", "--force", "-o", "{mine}"],
    "calibrate --profile": ["calibrate", "emoji-flux", "--profile", "{mine}", "-o", "new"],
    "refit": ["refit", "{mine}", "--speedup", "3"],
    "refit -o": ["refit", "policy", "-o", "{mine}"],
    "solve": ["solve", "policy", "--speedup", "3", "-o", "{mine}"],
    "merge": ["merge", "policy", "-o", "{mine}"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("no_model")
def test_two_processes_write_one_file(
    command: str,
    policy_file: Path,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "mine"):
        Path(name).write_bytes(policy_file.read_bytes())
    with holding_lock(tmp_path / "mine") as other:
        line = refused(*(word.format(mine="mine") for word in COMMANDS[command]))
    assert f"'mine' is being written by process {other.pid} on " in line
    assert Path("mine").read_bytes() == policy_file.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} <= {"policy", "mine", ".mine.lock"}


def test_a_killed_process_leaves_no_lock(policy_file: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "mine"
    path.write_bytes(policy_file.read_bytes())
    with holding_lock(path) as other:
        other.kill()
        other.wait()
        assert run("solve", path, "--speedup", 3, "-o", path).exit_code == 0
    assert list(tmp_path.iterdir()) == [path]
