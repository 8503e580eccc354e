"""The results file of a benchmark: one row per method and budget, with intervals.

In memory a quantity and its interval are one ``Interval``; the file has three keys for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, get_args, get_type_hints

from ertacache.bench.journal import Record
from ertacache.formats.files import write_whole
from ertacache.metrics import bootstrap_interval

__all__ = [
    "FULL",
    "TRAJECTORY",
    "BenchRow",
    "Interval",
    "check_replaceable",
    "largest_speedup",
    "measured_row",
    "read_results",
    "write_results",
]

FULL, TRAJECTORY = "full", "trajectory"  # the full run and our method, as rows name them

TOLERANCE = 1.05  # FLOPs of a method over those of its budget, at most, for a fair comparison
SAME_MEAN, SAME_TENTH = 40.0, 35.0  # dB: a mean and a tenth percentile at which no one sees it

# Keys of a file that differ from the names of fields.
_KEYS = {"setting": "knob", "psnr": "psnr_db", "psnr_tenth": "psnr_p10", "lead": "lead_db"}
_INTERVALS = ("speedup", "psnr", "lead", "ssim", "lpips", "flickering")


class Interval(NamedTuple):
    """A mean, or a median, with the ends of its interval."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int) -> Interval:
        """The same with so many digits after the decimal point."""
        return Interval(*(round(number, digits) for number in self))


@dataclass(frozen=True)
class BenchRow:
    """One method at one budget, evaluated on held-out prompts.

    Attributes:
        model: name of the model.
        method: name of the method.
        budget: its target speed-up.
        steps: steps of a full run.
        compute_steps: steps on which the whole network ran; None for methods that save otherwise.
        setting: parameter of the method and its value.
        prompts: number of held-out prompts.
        flops_ratio: the network's FLOPs over those of the full run.
        seconds: median of a call.
        speedup: the full run's time over this one's, median and quartiles over batches.
        cached_bytes: tensors alive in the second half of a run, beyond those of a full run.
        psnr: mean PSNR to the full run in dB, with its 95 % interval over prompts.
        psnr_tenth: PSNR that nine of ten prompts exceed (p10).
        lead: mean over prompts of trajectory's PSNR minus this one's at this budget, likewise.
        ssim: mean SSIM, likewise.
        lpips: mean LPIPS (AlexNet), likewise; None without its weights.
        flickering: of videos, mean of VBench's temporal flickering, likewise; 1 is a still.
        fid: of images, FID to reference images; comparable only for the same number of prompts.
        why_not: why the method does not apply to this model.
    """

    model: str
    method: str
    budget: float
    steps: int
    compute_steps: int | None = None
    setting: str | None = None
    prompts: int = 0
    flops_ratio: float | None = None
    seconds: float | None = None
    speedup: Interval | None = None
    cached_bytes: int | None = None
    psnr: Interval | None = None
    psnr_tenth: float | None = None
    lead: Interval | None = None
    ssim: Interval | None = None
    lpips: Interval | None = None
    flickering: Interval | None = None
    fid: float | None = None
    why_not: str | None = None

    @property
    def keeps_budget(self) -> bool:
        """Whether it costs no more than its budget, give or take 5 % of it.

        Example:
            >>> [BenchRow("m", "x", 2.0, 30, flops_ratio=f).keeps_budget for f in (0.52, 0.6)]
            [True, False]
        """
        return self.flops_ratio is not None and self.flops_ratio * self.budget <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """The row with the keys of a results file.

        Example:
            >>> row = BenchRow("m", "uniform", 2.0, 30, psnr=Interval(40.0, 39.0, 41.0))
            >>> {key: value for key, value in row.to_json().items() if "psnr" in key}
            {'psnr_db': 40.0, 'psnr_low': 39.0, 'psnr_high': 41.0, 'psnr_p10': None}
        """
        written: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name in _INTERVALS:
                written |= zip(_interval_keys(name), value or (None,) * 3, strict=True)
            else:
                written[_KEYS.get(name, name)] = value
        return written

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> BenchRow:
        """The row of a results file.

        Raises:
            TypeError: a value is of the wrong type, or a key is missing or unknown.
        """
        given = dict(row)
        for name in _INTERVALS:
            ends = [given.pop(key, None) for key in _interval_keys(name)]
            given[name] = None if None in ends else Interval(*ends)
        made = cls(setting=given.pop("knob", None), psnr_tenth=given.pop("psnr_p10", None), **given)
        for name, kind in get_type_hints(cls).items():
            if not _has_type(getattr(made, name), kind):
                raise TypeError(f"{name} is {getattr(made, name)!r}")
        return made


def _has_type(value: object, kind: Any) -> bool:
    """Whether a value from JSON fits a field; numbers must be finite."""
    if kind is Interval:
        return isinstance(value, Interval) and all(_has_type(end, float) for end in value)
    if kind is float:
        return _has_type(value, int) or (isinstance(value, float) and math.isfinite(value))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    options = get_args(kind)  # of what may be None
    return any(_has_type(value, one) for one in options) if options else isinstance(value, kind)


def _interval_keys(name: str) -> tuple[str, str, str]:
    return _KEYS.get(name, name), f"{name}_low", f"{name}_high"


def _mean(values: Sequence[float], digits: int) -> Interval | None:
    """The mean with its bootstrap interval; None of no values."""
    if not values:
        return None
    return Interval(sum(values) / len(values), *bootstrap_interval(values)).rounded(digits)


def _quartiles(values: Sequence[float]) -> Interval:
    """Median, lower and upper quartile; of few values the nearest ones.

    Example:
        >>> _quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        Interval(value=3.0, low=2.0, high=4.0)
    """
    ranked = sorted(values)
    quarter = (len(ranked) - 1) / 4
    return Interval(median(ranked), ranked[math.floor(quarter)], ranked[math.ceil(3 * quarter)])


def _tenth(values: Sequence[float]) -> float:
    """The tenth percentile.

    Example:
        >>> _tenth([30.0, 40.0, 50.0])
        32.0
    """
    cuts = quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    return round(cuts[0], 2)


def measured_row(
    row: BenchRow,
    records: Sequence[Record],
    full: Sequence[Record],
    ours: Sequence[Record] = (),
) -> BenchRow:
    """Fill a row with measurements.

    Args:
        row: what is known before: names, cost, or why the method does not apply.
        records: of the method at this budget.
        full: of the full run, for speed-ups batch by batch.
        ours: of trajectory at the same budget, for differences in PSNR prompt by prompt.
    """
    if not records:
        return row
    full_seconds = {record.batch: record.seconds for record in full}

    def mean(metric: str, digits: int) -> Interval | None:
        return _mean([x for record in records for x in record.scores.get(metric, [])], digits)

    return replace(
        row,
        prompts=sum(len(next(iter(record.scores.values()))) for record in records),
        seconds=round(median(record.seconds for record in records), 4),
        speedup=_quartiles([full_seconds[r.batch] / r.seconds for r in records]).rounded(3),
        psnr=mean("psnr", 2),
        psnr_tenth=_tenth([x for record in records for x in record.scores["psnr"]]),
        lead=_mean(_leads(ours, records), 2) if ours else None,
        ssim=mean("ssim", 7),
        lpips=mean("lpips", 7),
        flickering=mean("flickering", 5),
    )


def _leads(ours: Sequence[Record], records: Sequence[Record]) -> list[float]:
    """Our PSNR minus that of another method, prompt by prompt, in dB."""
    mine = {record.batch: record.scores["psnr"] for record in ours}
    return [
        a - b
        for record in records
        for a, b in zip(mine[record.batch], record.scores["psnr"], strict=True)
    ]


def largest_speedup(rows: Sequence[BenchRow]) -> tuple[float, bool] | None:
    """The largest speed-up of a method whose results still look the same.

    That is: a mean PSNR of 40 dB and more, and nine of ten prompts with 35 dB and more. A speed-up
    is the full run's FLOPs over the method's; between budgets both are interpolated.

    Args:
        rows: of one method on one model, by budget.

    Returns:
        The speed-up, and whether it is a limit of what was measured: all budgets look the same.
        None if even the smallest budget does not, or nothing was measured.

    Example:
        >>> def row(budget, mean, tenth):
        ...     psnr = Interval(mean, mean, mean)
        ...     return BenchRow("m", "x", budget, 30, psnr=psnr, psnr_tenth=tenth,
        ...                     flops_ratio=1 / budget)
        >>> largest_speedup([row(2.0, 50.0, 47.0), row(4.0, 35.0, 34.0)])
        (3.33, False)
        >>> largest_speedup([row(2.0, 50.0, 47.0)])
        (2.0, True)
    """
    found = sorted(
        (1 / row.flops_ratio, row.psnr.value - SAME_MEAN, row.psnr_tenth - SAME_TENTH)
        for row in rows
        if row.psnr is not None and row.psnr_tenth is not None and row.flops_ratio
    )
    if not found or min(found[0][1:]) < 0:
        return None
    for (slow, *above), (fast, *below) in pairwise(found):
        shares = [a / (a - b) for a, b in zip(above, below, strict=True) if b < 0]
        if shares:
            return round(slow + min(shares) * (fast - slow), 2), False
    return round(found[-1][0], 2), True


def write_results(path: Path, settings: Mapping[str, Any], rows: Sequence[BenchRow]) -> None:
    """Write a results file: the settings, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**settings, "rows": [row.to_json() for row in rows]}
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> tuple[dict[str, Any], list[BenchRow]]:
    """The settings and rows of a results file.

    Raises:
        ValueError: the file is not a results file.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        rows = [BenchRow.from_json(row) for row in settings.pop("rows")]
    except OSError as cause:
        raise ValueError(f"cannot read {str(path)!r}: {cause.strerror}") from cause
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise ValueError(f"{str(path)!r} is not a results file of `ertacache bench`") from cause
    return settings, rows


def check_replaceable(path: Path, *, continued: bool) -> None:
    """Raise if new results at ``path`` would lose a file.

    Args:
        path: the results file to write.
        continued: whether a journal holds what the old results were made from.

    Raises:
        ValueError: a file of another kind is there, or results that nothing else holds.
    """
    if not path.exists():
        return
    try:
        read_results(path)
    except ValueError as cause:
        raise ValueError(f"will not overwrite a file that is no benchmark: {cause}") from cause
    if not continued:
        raise ValueError(
            f"{str(path)!r} holds results that would be lost, for their journal is gone: give "
            "another file to write, or --force"
        )
