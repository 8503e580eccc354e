"""The benchmark from end to end: prepare every method, let them take turns, write the rows.

On every batch all entries run one after another, so that a slow moment of the machine hits all of
them. Whatever is found out is in the journal; an interrupted benchmark goes on from there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ertacache
from ertacache.baselines import BASELINES
from ertacache.bench.cost import count_flops, live_bytes, looking
from ertacache.bench.entries import (
    OURS,
    Entry,
    full_entry,
    method_names,
    policy_entries,
    rival_entries,
)
from ertacache.bench.realism import Realism, check_reference
from ertacache.bench.records import Cost, Journal, Record
from ertacache.bench.rows import BenchRow, make_row, write_results
from ertacache.bench.samples import Samples
from ertacache.bench.workload import Workload
from ertacache.calibration.profiling import Progress
from ertacache.metrics import NotAvailableError, lpips, psnr, ssim, temporal_flickering
from ertacache.metrics.files import media_files
from ertacache.metrics.video import IDENTICAL

__all__ = ["BUDGETS", "Bench"]

BUDGETS = (1.5, 2.0, 3.0)

Stage = Callable[[str], Progress | None]


@dataclass(frozen=True)
class Bench:
    """What is compared, and where the numbers go.

    Attributes:
        work: the pipeline and its prompts.
        output: the results file.
        budgets: speed-ups that every method is turned to.
        methods: names of the methods, all by default.
        command: what reproduces it, for the record.
        reference: folder of pictures that the model was trained on, for FID; none, no FID.
    """

    work: Workload
    output: Path
    budgets: Sequence[float] = BUDGETS
    methods: Sequence[str] = ()
    command: str = ""
    reference: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        unknown = set(self.methods) - set(method_names())
        if unknown:
            raise ValueError(
                f"no such method: {', '.join(sorted(unknown))}; there are: "
                f"{', '.join(method_names())}"
            )
        if not self.budgets or min(self.budgets) <= 1:
            raise ValueError("budgets are speed-ups, each greater than 1")
        if self.reference is not None:
            check_reference(self.reference)

    @property
    def journal_path(self) -> Path:
        """Where measurements are kept until the results are written, and after."""
        return self.output.with_suffix(".journal.jsonl")

    @property
    def samples_path(self) -> Path:
        """Where the results of the first prompts are kept, for the report."""
        return self.output.with_suffix(".samples.safetensors")

    def settings(self) -> dict[str, Any]:
        """How the numbers come about."""
        return {
            "model": self.work.model,
            "command": self.command,
            "call": {key: value for key, value in self.work.call.items() if _plain(value)},
            "budgets": list(self.budgets),
            "methods": list(self.methods or method_names()),
            "calibration": [self.work.calibration[0].seed, len(self.work.calibration)],
            "heldout": [self.work.heldout[0].seed, len(self.work.heldout)],
            "reference": None if self.reference is None else len(media_files(self.reference)),
            "batch_size": self.work.batch_size,
            "threads": torch.get_num_threads(),
            "device": str(getattr(self.work.pipe, "device", "cpu")),
            "versions": _versions(),
        }

    def run(self, stage: Stage | None = None) -> list[dict[str, Any]]:
        """Prepare, measure, and write the results file; return its rows."""
        tell = stage or (lambda name: None)
        journal = Journal(self.journal_path, self.settings())
        entries = self.prepare(journal, tell)
        costs = self._count_costs(entries, journal, tell("cost"))
        samples = self._measure(entries, journal, tell("measure"))
        distances = self._distances(entries, samples, tell)
        full = list(journal.of("full", 1.0))
        rows = [
            make_row(
                row,
                list(journal.of(row.method, row.budget)),
                full,
                [] if row.method in ("full", OURS[0]) else list(journal.of(OURS[0], row.budget)),
            )
            | {"fid": distances.get((row.method, row.budget))}
            for row in (self._row(entry, costs) for entry in entries)
        ]
        write_results(self.output, self.settings(), rows)
        return rows

    def prepare(self, journal: Journal, tell: Stage) -> list[Entry]:
        """Every method at every budget, the full run first."""
        names = list(self.methods or method_names())
        entries = [full_entry(self.work)]
        ours = [name for name in names if name in OURS]
        entries += policy_entries(self.work, self.budgets, ours, journal, tell("profile"))
        rivals = [BASELINES[name] for name in names if name in BASELINES]
        progress = tell("rivals")
        for done, rival in enumerate(rivals, start=1):
            entries += rival_entries(self.work, self.budgets, rival, journal)
            if progress is not None:
                progress(done, len(rivals))
        return entries

    def _count_costs(
        self, entries: Sequence[Entry], journal: Journal, progress: Progress | None
    ) -> dict[tuple[str, float], Cost]:
        """FLOPs of the first held-out batch and bytes in the middle of it, by method and budget."""
        costs = {}
        for done, entry in enumerate(entries, start=1):
            if entry.attach is not None:
                key = entry.method, entry.budget
                costs[key] = journal.cost(*key, partial(self._cost, entry))
            if progress is not None:
                progress(done, len(entries))
        return costs

    def _cost(self, entry: Entry) -> tuple[int, int]:
        work, runs, held = self.work, self.work.batches[0], list[int]()
        look = looking(_middle(entry, work.steps), held.append)
        call = {"output_type": "latent", "callback_on_step_end": look}
        assert entry.attach is not None
        before = live_bytes()  # a benchmark that goes on may hold more or less than it did
        with entry.attach():
            flops = count_flops(work.pipe, lambda: work.run(runs, **call))
        return flops, held[0] - before

    def _measure(
        self, entries: Sequence[Entry], journal: Journal, progress: Progress | None
    ) -> Samples:
        batches = self.work.batches
        running = [entry for entry in entries if entry.attach is not None]
        samples = Samples(self.samples_path)
        for number, batch in enumerate(batches):
            missing = [e for e in running if not journal.has(e.method, e.budget, number)]
            truth: Tensor | None = None
            for place, entry in enumerate(running):
                if entry in missing or (entry.method == "full" and missing):
                    assert entry.attach is not None
                    with entry.attach():
                        result, seconds = self.work.generate(batch)
                    truth = result if truth is None else truth
                    samples.add(entry.method, entry.budget, result, batch=number)
                    if entry in missing:
                        scores = _scores(result, truth)
                        journal.add(Record(entry.method, entry.budget, number, seconds, scores))
                if progress is not None:
                    progress(number * len(running) + place + 1, len(batches) * len(running))
            if missing:
                samples.save([run.prompt for run in batches[0]])
        return samples

    def _distances(
        self, entries: Sequence[Entry], samples: Samples, tell: Stage
    ) -> dict[tuple[str, float], float]:
        """FID of every entry to the reference pictures; nothing without them, or of videos."""
        kept = {
            (entry.method, entry.budget): pictures
            for entry in entries
            if (pictures := samples.pictures(entry.method, entry.budget, len(self.work.batches)))
            is not None
        }
        if self.reference is None or not kept:
            return {}
        judge, progress = Realism(self.reference), tell("FID")
        found = {}
        for done, (key, pictures) in enumerate(kept.items(), start=1):
            found[key] = round(judge.fid(pictures), 3)
            if progress is not None:
                progress(done, len(kept))
        return found

    def _row(self, entry: Entry, costs: Mapping[tuple[str, float], Cost]) -> BenchRow:
        full, cost = costs["full", 1.0], costs.get((entry.method, entry.budget))
        return BenchRow(
            model=self.work.model,
            method=entry.method,
            budget=entry.budget,
            steps=self.work.steps,
            compute_steps=entry.compute_steps,
            knob=entry.knob,
            flops_ratio=None if cost is None else round(cost.flops / full.flops, 4),
            cached_bytes=None if cost is None else max(0, cost.held - full.held),
            why_not=entry.why_not,
        )


def _middle(entry: Entry, steps: int) -> int:
    """A step in the second half of the run, whatever its length."""
    length = entry.compute_steps or steps if entry.method == "fewer steps" else steps
    return int(0.6 * length)


def _scores(result: Tensor, truth: Tensor) -> dict[str, list[float]]:
    """Distances of every prompt's result to the full run."""
    scores = {
        "psnr": psnr(result, truth).clamp_max(IDENTICAL).tolist(),
        "ssim": ssim(result, truth).tolist(),
    }
    with suppress(NotAvailableError):  # the column stays empty, and the report says what to install
        scores["lpips"] = lpips(result, truth).tolist()
    if result.ndim == 5:
        scores["flickering"] = temporal_flickering(result).tolist()
    return scores


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _versions() -> dict[str, str]:
    import diffusers

    return {
        "ertacache": ertacache.__version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
    }
