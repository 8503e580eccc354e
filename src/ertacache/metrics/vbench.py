"""VBench: videos in its naming convention, its command, its results file.

VBench pins old versions of numpy and diffusers, so it needs an environment of its own and is called
as a command.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from ertacache.formats.files import draft
from ertacache.metrics.weights import NotAvailableError

__all__ = [
    "CUSTOM_DIMENSIONS",
    "VbenchScore",
    "export_videos",
    "read_scores",
    "run_vbench",
    "vbench_name",
]

CUSTOM_DIMENSIONS = (  # those that VBench computes for custom prompts
    "subject_consistency",
    "background_consistency",
    "temporal_flickering",
    "motion_smoothness",
    "dynamic_degree",
    "aesthetic_quality",
    "imaging_quality",
    "temporal_style",
    "overall_consistency",
    "human_action",
)
RESULTS = "*_eval_results.json"
MAX_NAME = 255  # bytes of a file name
_UNSAFE = set('"$`\\\n')  # VBench puts paths between double quotes of a shell command
_START = "from vbench.cli.vbench import main; main()"


@dataclass(frozen=True)
class VbenchScore:
    """One dimension of VBench.

    Attributes:
        dimension: its name.
        mean: over all videos, as VBench reports it.
        videos: value by file name, where VBench reports a number.
    """

    dimension: str
    mean: float
    videos: Mapping[str, float]


def vbench_name(prompt: str, index: int) -> str:
    """The name of a video, from which VBench reads the prompt.

    Example:
        >>> vbench_name("a red apple", 0)
        'a red apple-0.mp4'
    """
    name = f"{prompt}-{index}.mp4"
    if not prompt.strip() or "/" in prompt or not prompt.isprintable():
        raise ValueError(
            f"VBench takes the prompt from the file name, but {prompt!r} is not a valid one"
        )
    if len(name.encode()) > MAX_NAME:
        raise ValueError(
            f"VBench takes the prompt from the file name: {prompt[:40]!r}... is too long"
        )
    return name


def export_videos(videos: Iterable[tuple[str, Path]], folder: Path) -> list[Path]:
    """Copy videos into a folder under the names that VBench expects.

    Args:
        videos: the prompt and the MP4 file of each; videos of the same prompt are numbered.
        folder: created if it does not exist.
    """
    seen: Counter[str] = Counter()
    plan: list[tuple[Path, Path]] = []
    for prompt, path in videos:
        if path.suffix.lower() != ".mp4":
            raise ValueError(f"VBench takes MP4 files, not {path.name!r}")
        plan.append((path, folder / vbench_name(prompt, seen[prompt])))
        seen[prompt] += 1
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in plan:
        with draft(target) as made:
            shutil.copyfile(source, made)
    return [target for _, target in plan]


def run_vbench(
    command: str | Path,
    videos: Path,
    *,
    dimensions: Sequence[str] = CUSTOM_DIMENSIONS,
    mode: str = "custom_input",
) -> dict[str, VbenchScore]:
    """Evaluate a folder of videos with VBench, one dimension after the other.

    Args:
        command: ``python`` or ``vbench`` of VBench's environment.
        videos: the folder, with names as from ``export_videos``.
        dimensions: what to evaluate.
        mode: ``"custom_input"`` for any prompts, ``"vbench_standard"`` for VBench's own.

    Raises:
        NotAvailableError: the command cannot be run.
        ValueError: it wrote no result; the message has its last line of output.
    """
    program = shutil.which(str(command))
    if program is None:
        raise NotAvailableError(
            f"VBench cannot be run as {str(command)!r}: pass the python of an environment with "
            "VBench (pip install vbench)"
        )
    if not videos.is_dir() or _UNSAFE & set(str(videos.resolve())):
        raise ValueError(f"VBench needs a folder without shell characters, got {str(videos)!r}")
    return {
        dimension: _evaluate(program, videos.resolve(), dimension, mode=mode)
        for dimension in dimensions
    }


def _evaluate(program: str, videos: Path, dimension: str, *, mode: str) -> VbenchScore:
    """One dimension. VBench exits with 0 even when it failed, so only its file counts."""
    start = [program, "-c", _START] if Path(program).name.startswith("python") else [program]
    # VBench starts "python" itself: that of its own environment must come first.
    folder = str(Path(program).absolute().parent)
    environment = os.environ | {"PATH": folder + os.pathsep + os.environ.get("PATH", "")}
    environment.pop("PYTHONPATH", None)
    with TemporaryDirectory(prefix="vbench-") as output:
        arguments = [f"--videos_path={videos}", f"--output_path={output}", f"--mode={mode}"]
        done = subprocess.run(
            [*start, "evaluate", *arguments, f"--dimension={dimension}"],
            cwd=output,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        found = sorted(Path(output).glob(RESULTS))
        if not found:
            lines = [line for line in done.stdout.splitlines() if line.strip()] or ["(none)"]
            raise ValueError(f"VBench wrote no result for {dimension}; its last line: {lines[-1]}")
        scores = read_scores(found[-1])
    if dimension not in scores:
        raise ValueError(f"the result of VBench has no {dimension}")
    return scores[dimension]


def read_scores(path: Path) -> dict[str, VbenchScore]:
    """Read a results file of VBench (``*_eval_results.json``)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: _score(name, *entry) for name, entry in content.items()}
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as cause:
        raise ValueError(f"{str(path)!r} is not a results file of VBench: {cause}") from cause


def _score(dimension: str, mean: Any, videos: Any = ()) -> VbenchScore:
    if not isinstance(mean, int | float) or not math.isfinite(mean):
        raise ValueError(f"VBench found no video for {dimension}")
    values = {
        Path(video["video_path"]).name: float(video["video_results"])
        for video in videos
        if isinstance(video["video_results"], int | float)
    }
    return VbenchScore(dimension, float(mean), MappingProxyType(values))
