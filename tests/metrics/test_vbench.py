"""VBench as a command, replaced by a script that writes what VBench writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ertacache.metrics import NotAvailableError
from ertacache.metrics.vbench import (
    CUSTOM_DIMENSIONS,
    export_videos,
    read_scores,
    run_vbench,
    vbench_name,
)
from tests.formats.faults import full_disk

FAKE = """#!{python}
import json, os, pathlib, sys
arguments = sys.argv[1:]
if arguments[0] == "-c":
    assert "vbench.cli" in arguments[1]
    del arguments[:2]
assert arguments.pop(0) == "evaluate"
given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
assert os.environ["PATH"].split(os.pathsep)[0] == str(pathlib.Path(sys.argv[0]).parent)
dimension, output = given["dimension"], pathlib.Path(given["output_path"])
print("mode", given["mode"])
if dimension == "imaging_quality":
    sys.exit("CUDA is not here")
videos = sorted(pathlib.Path(given["videos_path"]).iterdir())
rows = [dict(video_path=str(path), video_results=k / 2) for k, path in enumerate(videos)]
mean = sum(row["video_results"] for row in rows) / len(rows)
(output / "results_2026-01-01-00:00:00_full_info.json").write_text("[]")
result = output / "results_2026-01-01-00:00:00_eval_results.json"
result.write_text(json.dumps({{dimension: [mean, rows]}}))
"""


def fake(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / name).write_text(name)
    given = [("a cat", tmp_path / "a.mp4"), ("a dog", tmp_path / "b.mp4")]
    written = export_videos([*given, ("a cat", tmp_path / "c.mp4")], tmp_path / "videos")
    assert [path.name for path in written] == ["a cat-0.mp4", "a dog-0.mp4", "a cat-1.mp4"]
    assert written[2].read_text() == "c.mp4"
    return tmp_path / "videos"


@pytest.mark.parametrize("name", ["bin/vbench", "bin/python3"])
def test_the_command_is_run_and_its_results_read(tmp_path: Path, videos: Path, name: str) -> None:
    program = fake(tmp_path, name)
    scores = run_vbench(program, videos, dimensions=["motion_smoothness", "dynamic_degree"])
    assert list(scores) == ["motion_smoothness", "dynamic_degree"]
    score = scores["motion_smoothness"]
    assert score.mean == 0.5
    assert score.videos == {"a cat-0.mp4": 0, "a cat-1.mp4": 0.5, "a dog-0.mp4": 1}


def test_a_run_without_a_result_reports_the_last_line(tmp_path: Path, videos: Path) -> None:
    program = fake(tmp_path, "vbench")
    with pytest.raises(ValueError, match=r"no result for imaging_quality.* CUDA is not here"):
        run_vbench(program, videos, dimensions=["imaging_quality"])


def test_without_vbench_there_is_no_number(videos: Path) -> None:
    with pytest.raises(NotAvailableError, match="pip install vbench"):
        run_vbench("/absent/bin/python", videos)


def test_a_folder_that_a_shell_would_expand_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "$(touch mark)"
    bad.mkdir()
    with pytest.raises(ValueError, match="without shell characters"):
        run_vbench(sys.executable, bad)
    with pytest.raises(ValueError, match="VBench needs a folder"):
        run_vbench(sys.executable, tmp_path / "absent")


@pytest.mark.parametrize("prompt", ["a/b", "", "two\nlines", "x" * 300])
def test_a_prompt_that_is_not_a_file_name_is_refused(prompt: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="VBench takes the prompt from the file name"):
        vbench_name(prompt, 0)
    with pytest.raises(ValueError, match="VBench takes the prompt"):
        export_videos([("a cat", tmp_path / "a.mp4"), (prompt, tmp_path / "b.mp4")], tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_only_mp4_is_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes MP4 files, not 'a.gif'"):
        export_videos([("a cat", tmp_path / "a.gif")], tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"a": 3}', '{"a": []}', '{"a": [1.0, [{}]]}', '{"a": [NaN, []]}', '{"a": ["x"]}'],
)
def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x_eval_results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="VBench"):
        read_scores(path)


def test_a_result_with_booleans_and_lists_is_read(tmp_path: Path) -> None:
    rows = [
        {"video_path": "/v/a-0.mp4", "video_results": True},
        {"video_path": "/v/a-1.mp4", "video_results": [1, 2]},
    ]
    path = tmp_path / "x_eval_results.json"
    path.write_text(json.dumps({"dynamic_degree": [0.25, rows]}))
    (score,) = read_scores(path).values()
    assert score.mean == 0.25
    assert score.videos == {"a-0.mp4": 1.0}
    assert score.dimension in CUSTOM_DIMENSIONS


def test_a_full_disk_leaves_no_truncated_copy(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"video" * 100)
    with full_disk(), pytest.raises(OSError, match=r"a cat-0.mp4"):
        export_videos([("a cat", tmp_path / "a.mp4")], tmp_path / "videos")
    assert list((tmp_path / "videos").iterdir()) == []
