"""Plans on the network: many prompts in lockstep, in batches, and on many processes.

A refit runs one call of the pipeline per batch side by side, each on a copy of the pipeline that
shares the weights; at every step the calls wait for each other and fit the step on the sum of their
normal equations, which is added up in the order of batches. Of a process one call runs at a time.
A call is that of its batch alone, whatever the other batches are and whoever runs them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.reference import Reference
from ertacache.calibration.session import Session, group_runs
from ertacache.calibration.sharing import Phase, Record
from ertacache.core.distance import distances
from ertacache.core.plans import TrajectoryPlan, uniform_schedule
from ertacache.core.simulate import Fit
from ertacache.core.steppers import RefitStepper, ResponseStepper, response_of
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import find_denoisers
from ertacache.integration.private_api import Pipeline, fresh_copy, shallow_copy

__all__ = ["digest", "measure_response", "refit_plans", "run_plan"]


def run_plan(
    session: Session,
    reference: Reference,
    plan: TrajectoryPlan,
    *,
    fingerprint: Fingerprint,
    phase: Phase = "trial",
) -> Tensor:
    """Distance of every prompt to its full run under a plan, shape (P,), float64."""
    policy = _policy(fingerprint, plan, reference)

    def run(batch: Sequence[ProfiledPrompt]) -> Record:
        final = session.lockstep(batch, policy, phase=phase)
        target = reference.latents.select(reference.places(batch))[-1]
        return {"distances": distances(final, target)}

    found = torch.empty(len(reference.runs), dtype=torch.float64)
    facts = [phase, digest(plan), reference.schedule.sigmas.tolist()]
    shared = session.sharing.share(
        "plan", reference.batches, run, facts=facts, owners=reference.owners
    )
    for batch, record in zip(reference.batches, shared, strict=True):
        found[reference.places(batch)] = record["distances"]
    return found


def measure_response(
    session: Session, reference: Reference, plan: TrajectoryPlan, *, fingerprint: Fingerprint
) -> Tensor:
    """How outputs respond to the errors of a plan's latents, shape (T,), float64.

    Args:
        session: the pipeline.
        reference: full runs of some prompts.
        plan: a plan of one group.
        fingerprint: of the policy.
    """
    schedule = reference.schedule
    every = _blank(range(schedule.num_steps), reference, Fit())

    def run(batch: Sequence[ProfiledPrompt]) -> Record:
        latents = reference.latents.select(reference.places(batch))
        stepper = ResponseStepper(plan, latents, run=schedule.latents)
        policy = _policy(fingerprint, every, reference)
        session.lockstep(batch, policy, stepper, phase="trial")
        return {"products": stepper.products}

    shared = session.sharing.share(
        "response",
        reference.batches,
        run,
        facts=[digest(plan), schedule.sigmas.tolist()],
        owners=reference.owners,
    )
    return response_of(torch.stack([record["products"] for record in shared]).sum(0))


def refit_plans(
    session: Session,
    reference: Reference,
    compute_steps: Sequence[int],
    *,
    fingerprint: Fingerprint,
    fit: Fit,
    weights: Tensor | None = None,
    follows: Sequence[int] | None = None,
) -> tuple[list[TrajectoryPlan], Tensor]:
    """Refit a compute schedule in closed loop, once or for several kinds of runs at once.

    Args:
        session: the pipeline.
        reference: the full runs of all prompts.
        compute_steps: the computed steps.
        fingerprint: of the policy.
        fit: history and ridge.
        weights: how much each run counts in each of K fits, shape (K, P), float64; those of weight
            0 run along. By default all count alike, in one fit.
        follows: the fit that each run takes its steps with, equal for all runs of a batch; by
            default the first.

    Returns:
        The K plans, and the distance of every prompt to its full run under its own, shape (P,).
    """
    runs = reference.runs
    counted = torch.ones(1, len(runs)) if weights is None else weights
    followed = [0] * len(runs) if follows is None else list(follows)
    blank = _blank(compute_steps, reference, fit)  # its coefficients are not used; the steps are
    policy = _policy(fingerprint, blank, reference)
    work = _Refit(session, reference, policy, fit, counted, followed)
    facts = [asdict(fit), list(compute_steps), counted.tolist(), followed]
    facts.append(reference.schedule.sigmas.tolist())
    found = session.sharing.once("refit", runs, work.run, facts=facts)
    return [
        TrajectoryPlan(blank.compute_steps, z, fit.groups, branch=fit.branch)
        for z in found["coefficients"]
    ], found["distances"]


@dataclass(frozen=True, eq=False)
class _Refit:
    """One refit on all batches, those of this process and those of the others.

    Attributes:
        session: the pipeline.
        reference: the full runs of all prompts.
        policy: with the compute schedule.
        fit: history and ridge.
        weights: how much each run counts in each fit.
        follows: the fit that each run takes its steps with.
    """

    session: Session
    reference: Reference
    policy: Policy
    fit: Fit
    weights: Tensor
    follows: Sequence[int]

    def run(self) -> Record:
        """Coefficients of every fit and distances, exchanged between all processes."""
        sharing, batches = self.session.sharing, self._batches()
        meeting = _Meeting(list(batches), sharing.add_up)
        calls = [(batch, self._stepper(batch, meeting)) for batch in batches.values()]
        if not calls:  # more processes than batches: the others wait for its part of every sum
            for _ in range(self.reference.schedule.num_steps):
                sharing.add_up({})
        elif len(calls) == 1:
            meeting.begin(0)
            self.session.lockstep(calls[0][0], self.policy, calls[0][1])
        else:
            meeting.run(self.session, self.policy, calls)
        return self._collect(batches, [stepper for _, stepper in calls])

    def _batches(self) -> dict[int, Sequence[ProfiledPrompt]]:
        """The batches of this process by their numbers."""
        reference, number = self.reference, self.session.sharing.processes.number
        mine: dict[int, Sequence[ProfiledPrompt]] = {
            k: reference.batches[k] for k, o in enumerate(reference.owners) if o == number
        }
        if "scheduler" in vars(self.session.pipe) or self.session.one_by_one:
            return mine
        # An object around a pipeline cannot be copied: all in one call, in smaller ones of the
        # network. Then the number of processes matters, to rounding.
        found: dict[int, Sequence[ProfiledPrompt]] = {}
        for group in group_runs([run for batch in mine.values() for run in batch]):
            found[next(k for k, batch in mine.items() if group[0] in batch)] = group
        return found

    def _stepper(self, batch: Sequence[ProfiledPrompt], meeting: _Meeting) -> RefitStepper:
        reference, places = self.reference, self.reference.places(batch)
        return RefitStepper(
            reference.latents.select(places),
            compute_steps=self.policy.default.compute_steps,
            nominal=reference.schedule.nominal,
            fit=self.fit,
            weights=self.weights[:, places],
            follows=self.follows[places[0]],
            layout=reference.find_layout,
            reduce=meeting.add,
        )

    def _collect(
        self, batches: Mapping[int, Sequence[ProfiledPrompt]], steppers: Sequence[RefitStepper]
    ) -> Record:
        """The distances of all runs, and the coefficients that the batches followed."""
        reference, found = self.reference, dict[str, Tensor]()
        for batch, stepper in zip(batches.values(), steppers, strict=True):
            places = reference.places(batch)
            found[f"fit {self.follows[places[0]]}"] = stepper.coefficients
            for place, distance in zip(places, stepper.distances, strict=True):
                found[str(place)] = distance
        joined = self.session.sharing.gather("refitted", found)
        every = [joined[str(place)] for place in range(len(reference.runs))]
        fits = [joined[f"fit {k}"] for k in range(len(self.weights))]
        return {"distances": torch.stack(every), "coefficients": torch.stack(fits)}


def digest(plan: TrajectoryPlan) -> list[object]:
    """What identifies a plan among the parts of finished work."""
    numbers = hashlib.sha256(plan.coefficients.contiguous().numpy().tobytes()).hexdigest()
    return [list(plan.compute_steps), numbers, str(plan.groups), plan.branch]


def _blank(compute_steps: Sequence[int], reference: Reference, fit: Fit) -> TrajectoryPlan:
    steps = reference.schedule.num_steps
    z = torch.zeros(steps, 1, 1 + fit.history, dtype=torch.float64)
    return TrajectoryPlan(tuple(compute_steps) or uniform_schedule(steps, 2), z)


def _policy(fingerprint: Fingerprint, plan: TrajectoryPlan, reference: Reference) -> Policy:
    schedule = reference.schedule
    fitted = FittedPlan(plan, schedule.sigmas, target=schedule.target)
    return Policy(fingerprint, plans=(fitted,))


@dataclass(eq=False)
class _Meeting:
    """The calls of this process, of which one runs at a time, that meet at every step.

    Attributes:
        numbers: of the batches of the calls.
        add_up: the sum of parts by number, with those of the other processes.
    """

    numbers: Sequence[int]
    add_up: Callable[[Mapping[int, Tensor]], Tensor]
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _all: threading.Condition = field(default_factory=threading.Condition)
    _parts: dict[int, Tensor] = field(default_factory=dict)
    _sum: Tensor | None = None
    _round: int = 0
    _error: BaseException | None = None
    _place: threading.local = field(default_factory=threading.local)

    def begin(self, call: int) -> None:
        """Say which of the calls this thread runs."""
        self._place.number = self.numbers[call]

    def add(self, part: Tensor) -> Tensor:
        """Wait for the parts of all calls; returns their sum, added up in the order of batches."""
        if len(self.numbers) == 1:
            return self.add_up({self._place.number: part})
        self._turn.release()
        try:
            with self._all:
                meeting = self._round
                self._parts[self._place.number] = part
                if len(self._parts) == len(self.numbers):
                    self._sum = self.add_up(self._parts)
                    self._parts, self._round = {}, meeting + 1
                    self._all.notify_all()
                else:
                    self._all.wait_for(lambda: self._round > meeting or self._error is not None)
                if self._error is not None:
                    raise _AnotherFailedError
                assert self._sum is not None
                found = self._sum
        finally:
            self._turn.acquire()
        return found

    def run(
        self, session: Session, policy: Policy, calls: Sequence[tuple[Any, RefitStepper]]
    ) -> None:
        """Run all calls to their end; an error of one ends them all, as an interruption does."""
        threads, modes = [], _modes()
        for number, (batch, stepper) in enumerate(calls):
            work = functools.partial(
                session.lockstep, batch, policy, stepper, pipe=_copy(session.pipe)
            )
            threads.append(
                threading.Thread(target=self._work, args=(number, work, modes), daemon=True)
            )
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._fail(error)
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _work(
        self, number: int, work: Callable[[], object], modes: Sequence[Callable[[], Any]]
    ) -> None:
        self.begin(number)
        with self._turn, ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            try:
                work()
            except _AnotherFailedError:
                pass
            except BaseException as error:  # raised again by the caller
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._all:
            self._error = self._error or error
            self._all.notify_all()


class _AnotherFailedError(Exception):
    """Ends a call after another one failed."""


def _modes() -> list[Callable[[], Any]]:
    """The modes of this thread that a new one does not begin with."""
    found: list[Callable[[], Any]] = [
        functools.partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    if torch.is_inference_mode_enabled():
        found.append(torch.inference_mode)
    elif not torch.is_grad_enabled():
        found.append(torch.no_grad)
    if torch.cuda.is_available():
        found.append(functools.partial(torch.cuda.device, torch.cuda.current_device()))
    return found


def _copy(pipe: Pipeline) -> Any:
    """A copy of a pipeline that shares its weights, with networks and a scheduler to attach to."""
    twin = copy.copy(pipe)
    parts: dict[str, Any] = {"scheduler": fresh_copy(pipe.scheduler)}
    parts |= {name: shallow_copy(module) for name, module in find_denoisers(pipe).items()}
    vars(twin).update(parts)
    return twin
