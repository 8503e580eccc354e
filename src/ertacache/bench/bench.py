"""The benchmark from end to end: prepare every method, run them in turns, write the rows.

On every batch all contestants run one after another, so that load on the machine affects all of
them. Every measurement goes to the journal; an interrupted benchmark resumes from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import ertacache
from ertacache.baselines import BASELINES
from ertacache.bench.contestants import (
    EXTRAPOLATIONS,
    POLICIES,
    Contestant,
    baseline_contestants,
    extrapolation_contestants,
    policy_contestants,
)
from ertacache.bench.cost import count_flops, live_bytes, watch_bytes
from ertacache.bench.journal import Cost, Journal, Record
from ertacache.bench.methods import METHODS
from ertacache.bench.results import (
    FULL,
    TRAJECTORY,
    BenchRow,
    check_replaceable,
    measured_row,
    write_results,
)
from ertacache.bench.samples import Samples
from ertacache.bench.workload import Workload
from ertacache.calibration.session import Progress, Stage
from ertacache.calibration.sharing import describe_pipeline
from ertacache.calibration.validate import psnr_to_full
from ertacache.distributed import Processes
from ertacache.formats.lock import locked
from ertacache.metrics import NotAvailableError, lpips, ssim, temporal_flickering
from ertacache.metrics.distribution import ReferenceFid, reference_images
from ertacache.metrics.files import media_files

__all__ = ["BUDGETS", "Bench", "default_budgets"]

BUDGETS = (1.5, 2.0, 3.0, 4.0, 5.0)
MEASURED_AT = 0.6  # share of a run's steps after which its memory is measured

Item = TypeVar("Item")


def default_budgets(steps: int) -> tuple[float, ...]:
    """The budgets that are possible with so many steps: at least two have to be computed.

    Example:
        >>> default_budgets(30), default_budgets(6)
        ((1.5, 2.0, 3.0, 4.0, 5.0), (1.5, 2.0, 3.0))
    """
    return tuple(budget for budget in BUDGETS if budget <= steps / 2)


@dataclass(frozen=True)
class Bench:
    """A comparison of methods and its results file.

    Attributes:
        work: the pipeline and its prompts.
        output: the results file.
        budgets: target speed-ups of every method.
        methods: names of the methods, all by default.
        command: the command that reproduces it, stored with the results.
        reference: folder of training images, to compute FID.
        force: replace results whose journal is gone.
    """

    work: Workload
    output: Path
    budgets: Sequence[float] = BUDGETS
    methods: Sequence[str] = ()
    command: str = ""
    reference: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        unknown = set(self.methods) - set(METHODS)
        if unknown:
            raise ValueError(
                f"no such method: {', '.join(sorted(unknown))}; there are: {', '.join(METHODS)}"
            )
        derived = sorted(set(self.methods) & EXTRAPOLATIONS.keys())
        if derived and TRAJECTORY not in self.methods:
            raise ValueError(f"{derived[0]!r} has the compute schedule of trajectory: add that")
        if not self.budgets or not all(1 < budget < math.inf for budget in self.budgets):
            raise ValueError("budgets are speed-ups, each a finite number greater than 1")
        if max(self.budgets) > self.work.steps / 2:
            raise ValueError(
                f"budgets of {self.work.steps} steps are at most {self.work.steps / 2:g}, so that "
                f"two are computed, got {max(self.budgets):g}"
            )
        if self.reference is not None:
            reference_images(self.reference)
            if len(self.work.heldout) < 2:
                raise ValueError("FID needs at least two held-out prompts")
        check_replaceable(self.output, continued=self.journal_path.exists() or self.force)

    @property
    def processes(self) -> Processes:
        """Those that share the held-out batches; the main one writes."""
        return self.work.session.sharing.processes

    @property
    def journal_path(self) -> Path:
        """File of all measurements."""
        return self.output.with_suffix(".journal.jsonl")

    @property
    def samples_path(self) -> Path:
        """File of the generated samples."""
        return self.output.with_suffix(".samples.safetensors")

    def settings(self) -> dict[str, Any]:
        """Settings, as stored with the results."""
        return {
            "model": self.work.model,
            "command": self.command,
            "call": {key: value for key, value in self.work.session.call.items() if _plain(value)},
            "budgets": list(self.budgets),
            "methods": list(self.methods or METHODS),
            "calibration": [self.work.calibration[0].seed, len(self.work.calibration)],
            "heldout": [self.work.heldout[0].seed, len(self.work.heldout)],
            "reference": None if self.reference is None else len(media_files(self.reference)),
            "batch_size": self.work.session.batch_size,
            "threads": torch.get_num_threads(),
            "device": str(getattr(self.work.pipe, "device", "cpu")),
            "versions": _versions(),
        }

    def identity(self) -> dict[str, Any]:
        """What a journal must have in common with a benchmark that continues it."""
        work, found = self.work, self.settings()
        del found["command"]  # another spelling of the same
        runs = [[run.prompt, run.seed] for run in (*work.calibration, *work.heldout)]
        facts = describe_pipeline(work.pipe, work.session.call, work.session.batch_size)
        return found | {
            "prompts": _digest(json.dumps(runs)),
            "pipeline": _digest(facts),
            "reference": None if self.reference is None else str(self.reference.resolve()),
        }

    def run(self, stage: Stage | None = None) -> list[BenchRow]:
        """Prepare, measure, and write the results file; return its rows.

        Raises:
            ValueError: another process is writing the journal, or it has other settings.
        """
        with ExitStack() as stack:
            if self.processes.is_main:
                self.output.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.journal_path))
            path = self.journal_path if self.processes.is_main else None
            journal = Journal(path, self.identity())
            if self.processes.count > 1:
                journal.restore(self.processes.from_main("journal", journal.snapshot()))
            return self._run(journal, stage or (lambda name: None))

    def _run(self, journal: Journal, stage: Stage) -> list[BenchRow]:
        contestants = self.prepare(journal, stage)
        running = [contestant for contestant in contestants if contestant.why_not is None]
        costs = {
            contestant.key: journal.cost(*contestant.key, partial(self._cost, contestant))
            for contestant in _reported(running, stage("cost"))
        }
        samples = self._measure(running, journal, stage("measure"))
        rows = [self._row(contestant, costs, journal) for contestant in contestants]
        if not self.processes.is_main:
            return rows
        write_results(self.output, self.settings(), rows)  # FID may fail, and nothing else is lost
        if self.reference is not None:
            found = self._distances(self.reference, running, samples, stage)
            rows = [replace(row, fid=found.get((row.method, row.budget))) for row in rows]
            write_results(self.output, self.settings(), rows)
        return rows

    def prepare(self, journal: Journal, stage: Stage) -> list[Contestant]:
        """Every method at every budget, the full run first."""
        work, budgets, names = self.work, self.budgets, list(self.methods or METHODS)
        policies = [name for name in names if name in POLICIES]
        baselines = [BASELINES[name] for name in names if name in BASELINES]
        contestants = [Contestant(FULL, 1.0, compute_steps=work.steps)]
        contestants += policy_contestants(work, budgets, policies, journal)
        derived = [name for name in names if name in EXTRAPOLATIONS]
        contestants += extrapolation_contestants(work, budgets, derived, journal)
        for baseline in _reported(baselines, stage("baselines")):
            contestants += baseline_contestants(work, budgets, baseline, journal)
        return contestants

    def _cost(self, contestant: Contestant) -> tuple[int, int]:
        """FLOPs of the first held-out batch, and bytes allocated in the second half of it."""
        work, runs, held = self.work, self.work.batches[0], list[int]()
        watch = watch_bytes(MEASURED_AT, held.append)
        call = {"output_type": "latent", "callback_on_step_end": watch}
        before = live_bytes()  # differs between a fresh and a resumed benchmark
        with contestant.attach():
            flops = count_flops(work.pipe, lambda: work.session.run(runs, **call))
        return flops, held[0] - before

    def _measure(
        self, running: Sequence[Contestant], journal: Journal, progress: Progress | None
    ) -> Samples:
        """Run every contestant on every batch that the journal does not have.

        Of several processes each measures a batch, with all contestants, then they exchange.
        """
        batches, processes = self.work.batches, self.processes
        samples = Samples(self.samples_path, every=self.reference is not None)
        for first in range(0, len(batches), processes.count):
            mine = range(len(batches))[first + processes.number :][:1]
            measured = [self._measure_batch(k, running, journal, samples, progress) for k in mine]
            fresh = [asdict(record) for records in measured for record in records]
            found = processes.exchange("records", json.dumps(fresh).encode())
            for record in (Record(**each) for data in found for each in json.loads(data)):
                if not journal.has(record.method, record.budget, record.batch):
                    journal.add(record)
            for data in processes.exchange("samples", samples.pack(mine)):
                samples.unpack(data)
            if processes.is_main:
                samples.save([run.prompt for run in batches[0]])
        return samples

    def _measure_batch(
        self,
        number: int,
        running: Sequence[Contestant],
        journal: Journal,
        samples: Samples,
        progress: Progress | None,
    ) -> list[Record]:
        """Run every contestant on a batch, if the journal does not have it; the new records."""
        missing, found = list[Contestant](), list[Record]()
        for contestant in running:
            known = journal.has(*contestant.key, number)
            if not known or not samples.has(*contestant.key, batch=number):
                missing.append(contestant)
        truth: Tensor | None = None
        made, made_by = None, running[0]
        for place, contestant in enumerate(running, start=1):
            if contestant in missing or (contestant is running[0] and missing):
                # A method that cannot become cheaper has one setting for several budgets.
                if made is None or not contestant.same_run(made_by):
                    with contestant.attach():
                        made = self.work.session.generate(self.work.batches[number])
                    made_by = contestant
                truth = made.results if truth is None else truth
                samples.add(*contestant.key, made.results.nan_to_num(), batch=number)
                if contestant in missing and not journal.has(*contestant.key, number):
                    scores = _scores(made.results, truth)
                    found.append(Record(*contestant.key, number, made.seconds, scores))
                    journal.add(found[-1])
            if progress is not None:
                progress(number * len(running) + place, len(self.work.batches) * len(running))
        return found

    def _distances(
        self, reference: Path, running: Sequence[Contestant], samples: Samples, stage: Stage
    ) -> dict[tuple[str, float], float]:
        """FID of every contestant to the reference images; none of videos."""
        found = [(c.key, samples.images(*c.key, len(self.work.batches))) for c in running]
        generated = [(key, images) for key, images in found if images is not None]
        if not generated:
            return {}
        fid, progress = ReferenceFid(reference), stage("FID")
        return {key: round(fid(images), 3) for key, images in _reported(generated, progress)}

    def _row(
        self, contestant: Contestant, costs: Mapping[tuple[str, float], Cost], journal: Journal
    ) -> BenchRow:
        full, cost = costs[FULL, 1.0], costs.get(contestant.key)
        row = BenchRow(
            model=self.work.model,
            method=contestant.method,
            budget=contestant.budget,
            steps=self.work.steps,
            compute_steps=contestant.compute_steps,
            setting=contestant.setting,
            flops_ratio=None if cost is None else round(cost.flops / full.flops, 4),
            cached_bytes=None if cost is None else max(0, cost.held - full.held),
            why_not=contestant.why_not,
        )
        compared = row.method not in (FULL, TRAJECTORY)
        ours = journal.records(TRAJECTORY, row.budget) if compared else []
        return measured_row(row, journal.records(*contestant.key), journal.records(FULL, 1.0), ours)


def _reported(items: Sequence[Item], progress: Progress | None) -> Iterator[Item]:
    """The items, with the progress reported after each."""
    for done, item in enumerate(items, start=1):
        yield item
        if progress is not None:
            progress(done, len(items))


def _scores(result: Tensor, truth: Tensor) -> dict[str, list[float]]:
    """Metrics of every prompt's result against the full run."""
    scores = {"psnr": psnr_to_full(result, truth).tolist()}
    result = result.nan_to_num()  # one with NaN has the lowest PSNR there is, and is scored on
    scores["ssim"] = ssim(result, truth).tolist()
    with suppress(NotAvailableError):  # the column stays empty
        scores["lpips"] = lpips(result, truth).tolist()
    if result.ndim == 5:
        scores["flickering"] = temporal_flickering(result).tolist()
    return scores


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
