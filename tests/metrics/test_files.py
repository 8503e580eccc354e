from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from ertacache.metrics.files import media_files, pair_files, read_media
from ertacache.metrics.image import to_image
from tests.metrics.patterns import pattern


def test_an_image_keeps_its_levels(tmp_path: Path) -> None:
    image = pattern(8, 12)[0].float()
    to_image(image).save(tmp_path / "a.png")
    assert torch.equal(read_media(tmp_path / "a.png"), image)
    Image.new("RGBA", (5, 4), (255, 0, 51, 128)).save(tmp_path / "b.png")
    assert read_media(tmp_path / "b.png")[:, 0, 0].tolist() == pytest.approx([1, 0, 0.2])


def test_videos_are_read_frame_by_frame(tmp_path: Path) -> None:
    images = [Image.new("RGB", (32, 16), colour) for colour in ("black", "white", "black")]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=40)
    assert read_media(tmp_path / "a.gif").mean((1, 2, 3)).tolist() == [0, 1, 0]

    v3 = pytest.importorskip("imageio.v3")
    pytest.importorskip("imageio_ffmpeg")
    levels = torch.stack([torch.full((16, 32, 3), k, dtype=torch.uint8) for k in (0, 255, 128)])
    v3.imwrite(tmp_path / "b.mp4", levels.numpy(), plugin="FFMPEG", fps=8, macro_block_size=2)
    video = read_media(tmp_path / "b.mp4")
    assert video.shape == (3, 3, 16, 32)
    assert video.mean((1, 2, 3)).tolist() == pytest.approx([0, 1, 0.5], abs=0.02)


@pytest.mark.parametrize("name", ["a.png", "a.mp4", "a.gif"])
def test_a_broken_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=f"{name}' cannot be read"):
        read_media(tmp_path / name)


def test_what_would_lose_its_levels_is_refused(tmp_path: Path) -> None:
    Image.new("I;16", (4, 4)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="not of 8 bits"):
        read_media(tmp_path / "deep.png")
    frames = [Image.new("RGB", (4, 4), (level, 0, 0)) for level in (0, 255)]
    for name in ("moving.webp", "moving.png", "pages.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        with pytest.raises(ValueError, match=f"{name}' holds 2 images: write the frames"):
            read_media(tmp_path / name)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="is not an image or a video of a known format"):
        read_media(tmp_path / "a.txt")


def test_an_image_that_may_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16)
    with pytest.raises(ValueError, match=r"large\.png' cannot be read"):
        read_media(tmp_path / "large.png")


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    a = fill(tmp_path / "a", "2.png", "1.png", "deep/3.MP4", "only-a.jpg", "notes.txt")
    b = fill(tmp_path / "b", "1.png", "2.png", "deep/3.MP4", "3.mp4")
    found = pair_files(a, b)
    assert [pair.name for pair in found.pairs] == ["1.png", "2.png", "deep/3.MP4"]
    assert found.pairs[0].result == a / "1.png"
    assert found.pairs[0].reference == b / "1.png"
    assert found.unmatched == (a / "only-a.jpg", b / "3.mp4")
    assert list(media_files(b)) == ["1.png", "2.png", "3.mp4", "deep/3.MP4"]


def test_two_files_are_a_pair_whatever_their_names(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png")
    (pair,) = pair_files(tmp_path / "a.png", tmp_path / "b.png").pairs
    assert (pair.result, pair.reference) == (tmp_path / "a.png", tmp_path / "b.png")


def test_what_cannot_be_paired_is_refused(tmp_path: Path) -> None:
    a, b = fill(tmp_path / "a", "1.png"), fill(tmp_path / "b", "2.png")
    with pytest.raises(ValueError, match="no image or video of the same name"):
        pair_files(a, b)
    with pytest.raises(ValueError, match="two files or two folders"):
        pair_files(a, b / "2.png")
    with pytest.raises(ValueError, match="does not exist"):
        pair_files(a, tmp_path / "absent")


def test_what_a_killed_writer_left_is_not_compared(tmp_path: Path) -> None:
    for name in ("a.png", ".ertacache-00.png", ".hidden.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert list(media_files(tmp_path)) == ["a.png"]
