"""``ertacache metrics``: how far two files or two folders of images and videos are apart.

Only the command: ``ertacache.metrics`` reads the files and computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ertacache
from ertacache.cli.console import Stages, print_line, print_table
from ertacache.cli.group import command_line
from ertacache.cli.output import JsonFile
from ertacache.cli.writing import check_json, finite, write_json
from ertacache.formats.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from ertacache.metrics import Comparison, Score
    from ertacache.metrics.files import FilePair, Pairing

__all__ = ["EXAMPLES", "metrics"]

EXAMPLES = (
    "ertacache metrics fast.png full.png",
    "ertacache metrics fast/ full/ --metric psnr,ssim,lpips-alex,lpips-vgg --json metrics.json",
    "ertacache metrics fast/ training-images/ --metric fid,kid",
)
IMAGE_METRICS = "psnr,ssim,lpips-alex"
VIDEO_METRICS = f"{IMAGE_METRICS},flickering,motion"
SHOWN = 5  # skipped files that are named


def metrics(
    context: typer.Context,
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="What is evaluated.")],
    reference: Annotated[
        Path, typer.Argument(metavar="REFERENCE", help="What it is compared with.")
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME,NAME,...",
            help=f"Of psnr, ssim, lpips-alex, lpips-vgg, clip, flickering, motion, fid, kid. "
            f"Without it {IMAGE_METRICS}, and flickering,motion for videos.",
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            "--clip", metavar="MODEL", help="Folder of a CLIP model, or its hub id if downloaded."
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Compare two files, or two folders file by file.

    Files of folders are matched by name. A metric without its weights is reported as not available.
    fid and kid compare the folders as sets, whatever the names. Videos that are compressed differ
    more than what was generated: ertacache generate --lossless writes them as they are.
    """
    from ertacache.metrics.clip import DEFAULT_CLIP
    from ertacache.metrics.comparison import SET_METRICS, Comparison, parse_metrics
    from ertacache.metrics.files import Pairing, pair_files

    check_json(json)
    names = None if metric is None else parse_metrics(metric)
    sets = [name for name in names or () if name in SET_METRICS]
    if sets:
        _check_folders(result, reference)
    only_sets = names is not None and len(sets) == len(names)
    pairing = Pairing((), ()) if only_sets else pair_files(result, reference)
    names = parse_metrics(_default_metrics(pairing)) if names is None else names
    scores: dict[str, Score] = {}
    with Stages() as stage:
        stage("load")
        paired = [name for name in names if name not in SET_METRICS]
        comparison = Comparison(paired, clip=clip or DEFAULT_CLIP)
        if paired:
            _compare_pairs(comparison, pairing.pairs, stage)
            scores |= {score.metric: score for score in comparison.scores()}
        if sets:
            scores |= _compare_sets(sets, result, reference, stage)
    ordered = [scores[name] for name in names]
    _print_scores(ordered, pairing)
    if json is not None:
        record = {"version": ertacache.__version__, "command": command_line(context)}
        _write(json, record, ordered, pairing=pairing, values=comparison.values)


def _check_folders(*paths: Path) -> None:
    from ertacache.metrics.files import media_files

    for path in paths:
        if not path.is_dir():
            raise ValueError(f"fid and kid compare two folders, and {str(path)!r} is not one")
        if not media_files(path):
            raise ValueError(f"{str(path)!r} contains no image or video")


def _default_metrics(pairing: Pairing) -> str:
    from ertacache.metrics.files import is_video

    videos = any(is_video(pair.result) for pair in pairing.pairs)
    return VIDEO_METRICS if videos else IMAGE_METRICS


def _compare_pairs(comparison: Comparison, pairs: Sequence[FilePair], stage: Stages) -> None:
    from ertacache.metrics.files import read_media

    progress = stage("compare")
    for done, pair in enumerate(pairs):
        a, b = read_media(pair.result), read_media(pair.reference)
        try:
            comparison.add(a, b)
        except ValueError as error:
            raise ValueError(f"{pair.name}: {error}") from error
        progress(done + 1, len(pairs))


def _compare_sets(
    names: Sequence[str], result: Path, reference: Path, stage: Stages
) -> dict[str, Score]:
    from ertacache.metrics.comparison import compare_sets
    from ertacache.metrics.files import media_files, read_media

    def read(folder: Path) -> Iterator[Tensor]:
        files = media_files(folder)
        progress = stage(one_line(folder.name)[:10])
        for done, path in enumerate(files.values()):
            yield read_media(path)
            progress(done + 1, len(files))

    scores = compare_sets(names, read(result), read(reference))
    return {score.metric: score for score in scores}


def _print_scores(scores: Sequence[Score], pairing: Pairing) -> None:
    columns = ["", "mean", "95 %", "count", "better"]
    print_table("Against the reference", columns, [_row(score) for score in scores])
    for score in scores:
        for note in _notes(score):
            print_line(note)
    for line in filter(None, (_compressed(pairing), _unmatched(pairing))):
        print_line(line)


def _row(score: Score) -> list[str]:
    from ertacache.metrics.comparison import METRICS

    metric = METRICS[score.metric]
    better = "higher" if metric.higher_is_better else "lower"
    if score.mean is None:
        return [score.metric, "not available", "", "", better]
    spread = ""
    if score.low is not None and score.high is not None:
        spread = f"{score.low:.{metric.digits}f} to {score.high:.{metric.digits}f}"
    unit = f" {metric.unit}" if metric.unit else ""
    return [score.metric, f"{score.mean:.{metric.digits}f}{unit}", spread, str(score.count), better]


def _notes(score: Score) -> Iterator[str]:
    """What the row itself does not show."""
    from ertacache.metrics.inception import FEATURES

    if score.reason is not None:
        yield f"{score.metric} is not available: {one_line(score.reason)}"
    if score.identical:
        yield f"{score.identical} of {score.count} are identical and count for 100 dB"
    if score.metric == "fid" and 0 < score.count < FEATURES:
        yield f"fid of so few images (under {FEATURES}) compares only with sets of the same size"


def _compressed(pairing: Pairing) -> str | None:
    """How many videos are compressed with loss, on one line."""
    from ertacache.metrics.files import lossy_codec

    paths = {path for pair in pairing.pairs for path in (pair.result, pair.reference)}
    codecs = Counter(codec for path in paths if (codec := lossy_codec(path)) is not None)
    if not codecs:
        return None
    return (
        f"{codecs.total()} of {len(paths)} files are compressed with loss ({', '.join(codecs)}), "
        "which these values include: ertacache generate --lossless writes videos without it"
    )


def _unmatched(pairing: Pairing) -> str | None:
    """Name the skipped files, on one line."""
    paths = pairing.unmatched
    if not paths:
        return None
    names = ", ".join(one_line(path) for path in paths[:SHOWN])
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return f"skipped (no counterpart in the other folder): {names}{more}"


def _write(
    path: Path,
    record: Mapping[str, Any],
    scores: Sequence[Score],
    *,
    pairing: Pairing,
    values: Mapping[str, Sequence[float | None]],
) -> None:
    """Write the scores and the values of every file; an identical file has the PSNR null."""
    files = [
        {"name": pair.name} | {name: finite(column[place]) for name, column in values.items()}
        for place, pair in enumerate(pairing.pairs)
    ]
    content = {
        **record,
        "metrics": [asdict(score) for score in scores],
        "files": files if values else [],
        "unmatched": [str(path) for path in pairing.unmatched],
    }
    write_json(path, content)
