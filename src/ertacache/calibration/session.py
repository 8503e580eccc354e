"""A pipeline and how it is called: the one bundle that calibration, benchmark and commands share.

Prompts and seeds become arguments of the pipeline here, network evaluations are counted here, and
the latents of full runs are kept here for the refit. Knows neither profiles nor methods.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from os import PathLike
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.outputs import results_of
from ertacache.calibration.reference import Latents, Reference, RunFacts
from ertacache.calibration.sharing import (
    COUNTED,
    Evaluations,
    Phase,
    Record,
    Sharing,
    describe_pipeline,
    find_parts,
    taking_up,
)
from ertacache.core.groups import FOLDS
from ertacache.core.plans import Target
from ertacache.core.sampler import Stepper
from ertacache.distributed import ALONE, Processes
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.parts import Parts
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.attach import Handle
from ertacache.integration.choose import PlanChooser
from ertacache.integration.microbatch import MicroBatch
from ertacache.integration.private_api import Pipeline
from ertacache.integration.record import Recording, argument_default, record, takes_argument
from ertacache.integration.stats import RunStats

__all__ = [
    "HELDOUT_SEED",
    "Generated",
    "Progress",
    "Session",
    "Stage",
    "calibrated_steps",
    "group_runs",
    "interleave_runs",
    "number_runs",
    "open_session",
    "split_runs",
    "synchronized_time",
]

HELDOUT_SEED = 1_000_000
"""Added to the seed of calibration for held-out prompts: far from the seeds of calibration."""

Progress = Callable[[int, int], None]
"""Called with the work done and the work in all."""

Stage = Callable[[str], Progress | None]
"""Called with the name of a stage; returns what is called with its progress."""

STEPS = "num_inference_steps"
LATENTS = "latents"  # of a run, among the parts

RESERVED = {
    "generator": "and give seed=, the seed of the first prompt's noise",
    "latents": "and give seed=, the seed of the first prompt's noise",
    "output_type": "because results are compared as tensors",
    "prompt": "and give a list of prompts as the second argument",
}
"""Arguments of the pipeline that a session sets, and what to do instead."""


def number_runs(
    prompts: Sequence[str], seed: int = 0, *, varied: Mapping[str, Sequence[Any]] | None = None
) -> list[ProfiledPrompt]:
    """Give each prompt a seed of its own, counting up, and a value of every varied argument.

    Args:
        prompts: at least one.
        seed: of the first prompt.
        varied: values of the pipeline's arguments that the prompts are spread over, in turn.

    Example:
        >>> number_runs(["a cat", "a dog"], seed=7)[1]
        ProfiledPrompt(prompt='a dog', seed=8, arguments=())
        >>> number_runs(["a cat", "a dog"], varied={"guidance_scale": [2.0, 5.0]})[1].arguments
        (('guidance_scale', 5.0),)
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts must be a list of at least one string")
    names = sorted(varied or {})
    return [
        ProfiledPrompt(
            prompt,
            seed + k,
            tuple((name, varied[name][k % len(varied[name])]) for name in names) if varied else (),
        )
        for k, prompt in enumerate(prompts)
    ]


def split_runs(runs: Sequence[ProfiledPrompt], size: int) -> Iterator[list[ProfiledPrompt]]:
    """Batches of at most ``size`` runs with equal arguments, in order."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    for group in group_runs(runs):
        for start in range(0, len(group), size):
            yield group[start : start + size]


def group_runs(runs: Sequence[ProfiledPrompt]) -> list[list[ProfiledPrompt]]:
    """The runs by their arguments, each group in order."""
    groups: dict[object, list[ProfiledPrompt]] = {}
    for run in runs:
        groups.setdefault(run.arguments, []).append(run)
    return list(groups.values())


def interleave_runs(runs: Sequence[ProfiledPrompt]) -> list[ProfiledPrompt]:
    """The runs with their kinds of arguments in turn, so that the first of them hold every kind.

    Example:
        >>> low, high = (("guidance_scale", 2.0),), (("guidance_scale", 5.0),)
        >>> runs = [ProfiledPrompt("a cat", k, low if k < 2 else high) for k in range(4)]
        >>> [run.seed for run in interleave_runs(runs)]
        [0, 2, 1, 3]
    """
    rows = zip_longest(*group_runs(runs))
    return [run for row in rows for run in row if run is not None]


@dataclass(frozen=True, eq=False)
class Generated:
    """What one call of the pipeline gave.

    Attributes:
        results: images or videos with values from 0 to 1, shape (P, ...), on the CPU.
        seconds: of the whole call, without solving a plan, which only a schedule's first run does.
        stats: what was computed and reused; None without a policy.
        plan: the plan that was followed; None without a policy, and if all steps were computed.
    """

    results: Tensor
    seconds: float
    stats: RunStats | None
    plan: FittedPlan | None = None


class Session:
    """A pipeline, the arguments of its call, and the work done with it.

    Attributes:
        pipe: the pipeline, nothing attached.
        call: arguments of its call, without prompt, generator and output type.
        varied: values of arguments that prompts are to be spread over.
        batch_size: prompts per call of the pipeline; in lockstep, of the network.
        evaluations: of the network, so far.
        sharing: the processes, and the finished work that they keep.
        output_type: of results that are compared.
        one_by_one: whether the pipeline takes one prompt at a time.
    """

    def __init__(
        self,
        pipe: Pipeline,
        call: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 1,
        stage: Stage | None = None,
        processes: Processes = ALONE,
        parts: Parts | None = None,
    ) -> None:
        """Keep how the pipeline is called; ``stage`` receives the progress of every stage.

        An argument given as a list, where the pipeline's takes none, is varied. ``processes`` share
        the runs, and ``parts`` keeps those that are finished until their results are in a file.

        Raises:
            ValueError: if an argument is given that the session sets itself.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        for name in RESERVED.keys() & (call or {}).keys():
            raise ValueError(f"{name} is set for every prompt: leave it out, {RESERVED[name]}")
        self.pipe, self.batch_size = pipe, batch_size
        self.varied = _varied(pipe, call or {})
        self.call = {name: value for name, value in (call or {}).items() if name not in self.varied}
        steps = argument_default(pipe, STEPS)
        if isinstance(steps, int):
            self.call.setdefault(STEPS, steps)
        self.evaluations = Evaluations()
        self.output_type, self.one_by_one = "pt", False
        self.sharing = Sharing(
            self.evaluations,
            processes=processes,
            parts=parts,
            identity=lambda: describe_pipeline(pipe, call or {}, batch_size),
        )
        self._stage = stage if processes.is_main else None
        self._latents: dict[ProfiledPrompt, Sequence[Tensor]] = {}
        self._owners: dict[ProfiledPrompt, int] = {}  # processes that hold latents
        self._facts: dict[ProfiledPrompt, RunFacts] = {}
        self._choosers: dict[tuple[int, Target], PlanChooser] = {}

    @property
    def gives_schedule(self) -> bool:
        """Whether the call gives the noise levels themselves."""
        return any(self.call.get(name) is not None for name in ("sigmas", "timesteps"))

    def number_runs(self, prompts: Sequence[str], seed: int = 0) -> list[ProfiledPrompt]:
        """Runs of some prompts, spread over the varied arguments."""
        return number_runs(prompts, seed, varied=self.varied)

    def check_values(self, runs: Sequence[ProfiledPrompt]) -> None:
        """Raise if a value of a varied argument has no run."""
        for name, values in self.varied.items():
            there = [value for run in runs for key, value in run.arguments if key == name]
            missing = [value for value in values if value not in there]
            if missing:
                raise ValueError(
                    f"{name} has {len(values)} values, but of {len(runs)} prompts to calibrate on "
                    f"none is left for {missing[0]}: give more prompts, or fewer values"
                )

    def folds(self, runs: Sequence[ProfiledPrompt]) -> dict[ProfiledPrompt, int]:
        """Folds of some runs: they take turns, and each has all values of the varied arguments."""
        values = math.prod(len(values) for values in self.varied.values())
        return {run: place // values % FOLDS for place, run in enumerate(runs)}

    def progress(self, stage: str) -> Progress:
        """What to call with the progress of a stage that begins now."""
        found = None if self._stage is None else self._stage(stage)
        return found or (lambda done, total: None)

    def batches(self, runs: Sequence[ProfiledPrompt]) -> list[list[ProfiledPrompt]]:
        """The runs, batch by batch."""
        return list(split_runs(runs, self.batch_size))

    def run(self, runs: Sequence[ProfiledPrompt], **changes: Any) -> Any:
        """Call the pipeline on some runs, with whatever is attached to it."""
        return self.pipe(**self.arguments(runs, **changes))

    def arguments(self, runs: Sequence[ProfiledPrompt], **changes: Any) -> dict[str, Any]:
        """The arguments of a call: prompts, their noise, and the session's own, some changed."""
        call = self.call | dict(runs[0].arguments) | changes
        if "output_type" in call and not takes_argument(self.pipe, "output_type"):
            del call["output_type"]
        # The noise is drawn on the CPU: the same on every device and in every batch.
        noise = [torch.Generator("cpu").manual_seed(run.seed) for run in runs]
        if len(runs) == 1:  # as plain loops take them
            return call | {"prompt": runs[0].prompt, "generator": noise[0]}
        if isinstance(call.get("negative_prompt"), str):
            # One for all would be broadcast inside of some networks, where caches that compare
            # shapes would give up.
            call["negative_prompt"] = [call["negative_prompt"]] * len(runs)
        return call | {"prompt": [run.prompt for run in runs], "generator": noise}

    def generate(
        self,
        runs: Sequence[ProfiledPrompt],
        policy: Policy | None = None,
        *,
        target: Target | None = None,
        phase: Phase = "validation",
        **changes: Any,
    ) -> Generated:
        """Generate a batch of images or videos.

        ``policy`` is attached for this call; None runs the pipeline with whatever is attached.
        """
        attached: Any = nullcontext()
        chooser = None if policy is None else self._chooser(policy, target or Target())
        if policy is not None:
            attached = Handle(self.pipe, policy, chooser=chooser)
        with attached as handle:
            solved = 0.0 if chooser is None else chooser.seconds
            start = synchronized_time()
            result = self.run(runs, **(changes | {"output_type": self.output_type}))
            seconds = synchronized_time() - start
            seconds -= 0.0 if chooser is None else chooser.seconds - solved
        stats = None if handle is None else handle.stats.last
        computed = len(self.pipe.scheduler.timesteps) if stats is None else stats.computed_steps
        self.evaluations.add(phase, computed * len(runs))
        plan = None if handle is None else handle.plan
        return Generated(results_of(result), seconds, stats, plan)

    def _chooser(self, policy: Policy, target: Target) -> PlanChooser:
        """What chooses the plans of a policy; kept, so that each is solved once."""
        known = self._choosers.get((id(policy), target))
        if known is None:
            known = self._choosers[id(policy), target] = PlanChooser(policy, target)
        return known

    def record(
        self, runs: Sequence[ProfiledPrompt], *, phase: Phase, keep: Collection[ProfiledPrompt] = ()
    ) -> Recording:
        """Record the full runs of one batch; the latents of ``keep`` stay for ``reference``."""
        found = record(self.pipe, **self.arguments(runs))
        if len(found.run.latents[0]) != len(runs):
            raise PolicyError(
                f"{len(runs)} prompts gave latents of a batch of {len(found.run.latents[0])}: "
                "use batch_size=1 and one image per prompt"
            )
        self.evaluations.add(phase, found.run.num_steps * len(runs))
        facts = RunFacts.of(found)
        for place, run in enumerate(runs):
            if run in keep:
                self._facts[run] = facts
                self._keep(run, [x[place].cpu() for x in found.run.latents], phase)
        return found

    def _keep(self, run: ProfiledPrompt, latents: list[Tensor], phase: Phase) -> None:
        """Keep latents for ``reference``: among the parts if there are any, otherwise in memory."""
        parts = self.sharing.parts
        self._latents[run] = latents
        if parts is not None:
            # A run that was recorded to be profiled is counted with its profile.
            counted = Evaluations(refit=len(latents) - 1 if phase == "refit" else 0)
            key, facts = self.sharing.key("latents", [run]), self._facts[run].to_tensors()
            parts.save(key, facts | {LATENTS: torch.stack(latents), COUNTED: counted.take()})
            self._latents[run] = parts.rows(key, LATENTS) or latents

    def _holds(self, run: ProfiledPrompt) -> bool:
        """Whether this process has the latents of a run, from this session or an earlier one."""
        parts = self.sharing.parts
        if run not in self._latents and parts is not None:
            key = self.sharing.key("latents", [run])
            rows, known = parts.rows(key, LATENTS), parts.load(key, COUNTED, *RunFacts.NAMES)
            if rows is not None and known is not None:
                self._latents[run], self._facts[run] = rows, RunFacts.from_tensors(known)
                self.evaluations.add_all(known[COUNTED])
        return run in self._latents

    def reference(self, runs: Sequence[ProfiledPrompt]) -> Reference:
        """The full runs of some prompts: those kept, and the others recorded again."""
        batches = [tuple(batch) for batch in self.batches(runs)]
        owners = self.own(batches)

        def load(batch: Sequence[ProfiledPrompt]) -> Record:
            if not all([self._holds(run) for run in batch]):
                self.record(batch, phase="refit", keep=batch)
            return _joined([self._facts[run] for run in batch]).to_tensors()

        shared = list(self.sharing.share("reference", batches, load, owners=owners, kept=False))
        latents = Latents([self._latents.get(run) for run in runs])
        facts = _joined([RunFacts.from_tensors(record) for record in shared])
        return Reference(tuple(runs), latents, facts, tuple(batches), owners)

    def own(self, batches: Sequence[Sequence[ProfiledPrompt]]) -> tuple[int, ...]:
        """The process of every batch: the one that has its latents, otherwise they take turns."""
        found = []
        for number, batch in enumerate(batches):
            known = [self._owners[run] for run in batch if run in self._owners]
            found.append(known[0] if known else number % self.sharing.processes.count)
            self._owners |= dict.fromkeys(batch, found[-1])
        return tuple(found)

    def lockstep(
        self,
        runs: Sequence[ProfiledPrompt],
        policy: Policy,
        stepper: Stepper | None = None,
        *,
        pipe: Pipeline | None = None,
        phase: Phase = "refit",
    ) -> Tensor:
        """Run prompts of equal arguments in one call under a policy; returns the final latents.

        The pipeline holds the latents of all prompts, the network sees ``batch_size`` at a time.

        Args:
            runs: prompts and seeds.
            policy: the policy; its first plan is followed.
            stepper: takes the place of the plan's own.
            pipe: a copy of the pipeline, if several run side by side.
            phase: what the evaluations are counted for.
        """
        target = self.pipe if pipe is None else pipe
        micro_batch = MicroBatch(self.batch_size, prompts=len(runs))
        found: list[Tensor] = []  # not the result of the call: some pipelines decode all the same
        with Handle(
            target, policy, stepper=stepper, micro_batch=micro_batch, finished=found.append
        ) as handle:
            target(**self.arguments(runs, output_type="latent"))
        self.evaluations.add(phase, handle.stats.last.computed_steps * len(runs))
        return found[-1]


def _joined(facts: Sequence[RunFacts]) -> RunFacts:
    """What several runs have in common: a second history only if all of them have one."""
    return replace(facts[0], branch=all(each.branch for each in facts))


@contextmanager
def open_session(
    pipe: Pipeline,
    call: Mapping[str, Any],
    *,
    batch_size: int,
    stage: Stage | None,
    processes: Processes,
    resume: str | PathLike[str] | None = None,
    beside: str | PathLike[str] | None = None,
) -> Iterator[Session]:
    """A session whose finished work is kept, and removed when all is done.

    Args:
        pipe: the pipeline.
        call: arguments of its call.
        batch_size: prompts per call.
        stage: receives the progress of every stage.
        processes: those that share the runs; an error of one ends all of them.
        resume: folder to keep finished work in.
        beside: file to keep it beside, if no folder is given and there is need for it.
    """
    parts = find_parts(resume, beside=beside, processes=processes)
    with taking_up(parts, processes):
        yield Session(
            pipe, call, batch_size=batch_size, stage=stage, processes=processes, parts=parts
        )


def _varied(pipe: Pipeline, call: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Arguments given as a list of plain values, where the pipeline takes no list."""
    try:
        parameters = inspect.signature(type(pipe).__call__).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    found = {}
    for name, value in call.items():
        plain = isinstance(value, list) and all(isinstance(v, int | float | str) for v in value)
        taken = str(getattr(parameters.get(name), "annotation", ""))
        if plain and value and "list" not in taken.lower() and (anything or name in parameters):
            found[name] = value
    return found


def calibrated_steps(policy: Policy) -> dict[str, int]:
    """The argument with which a call has as many steps as the calibrated runs.

    Empty if those began later, as in image to image: their calls name more steps than they take.

    Raises:
        PolicyError: if the policy has neither a profile nor a plan.
    """
    if policy.profile is None:
        return {STEPS: policy.default.num_steps}
    return {STEPS: policy.profile.num_steps} if policy.profile.schedule.begun else {}


def synchronized_time() -> float:
    """Seconds since some moment in the past, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
