"""Plans on the network: many prompts in lockstep, also if their calls differ in an argument.

Prompts with other guidance cannot share a call of the pipeline. A refit of all of them runs one
call per value side by side, each on a copy of the pipeline that shares the weights; at every step
the calls wait for each other and fit the step on the sum of their normal equations. Only one of
them runs at a time.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.session import Phase, Reference, Session
from ertacache.core.distance import distances
from ertacache.core.plans import TrajectoryPlan, uniform_schedule
from ertacache.core.simulate import Fit
from ertacache.core.steppers import RefitStepper
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.integration.identity import find_denoisers
from ertacache.integration.private_api import Pipeline, fresh_copy, shallow_copy

__all__ = ["refit_plan", "run_plan"]


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
    found = torch.empty(len(reference.runs), dtype=torch.float64)
    for group in session.lockstep_groups(reference.runs):
        places = [reference.runs.index(run) for run in group]
        final = session.lockstep(group, policy, phase=phase)
        found[places] = distances(final, reference.latents[-1][places])
    return found


def refit_plan(
    session: Session,
    reference: Reference,
    compute_steps: Sequence[int],
    *,
    fingerprint: Fingerprint,
    fit: Fit,
    fitted: Sequence[int] | None = None,
) -> tuple[TrajectoryPlan, Tensor]:
    """Refit a compute schedule in closed loop.

    Args:
        session: the pipeline.
        reference: the full runs of all prompts.
        compute_steps: the computed steps.
        fingerprint: of the policy.
        fit: history and ridge.
        fitted: places of the runs that are fitted on; the others run along. None fits on all.

    Returns:
        The plan, and the distance of every prompt to its full run under it, shape (P,).
    """
    groups = session.lockstep_groups(reference.runs)
    meeting = _Meeting(len(groups))
    chosen = set(range(len(reference.runs)) if fitted is None else fitted)
    calls = []
    for group in groups:
        places = [reference.runs.index(run) for run in group]
        mine = torch.tensor([k for k, place in enumerate(places) if place in chosen]).long()
        stepper = RefitStepper(
            [x[places] for x in reference.latents],
            compute_steps=compute_steps,
            nominal=reference.schedule.nominal,
            fit=fit,
            fitted=mine,
            layout=reference.find_layout,
            reduce=None if len(groups) == 1 else meeting.add,
        )
        calls.append((places, group, stepper))
    # Its coefficients are not used; the steps are.
    policy = _policy(fingerprint, _blank(compute_steps, reference, fit), reference)
    if len(groups) == 1:
        session.lockstep(groups[0], policy, calls[0][2])
    else:
        meeting.run(session, policy, [(group, stepper) for _, group, stepper in calls])
    found = torch.empty(len(reference.runs), dtype=torch.float64)
    for places, _, stepper in calls:
        found[places] = stepper.distances
    return calls[0][2].plan(), found


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
    """Several calls side by side, of which one runs at a time, that meet at every step.

    Attributes:
        count: number of calls.
    """

    count: int
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _all: threading.Condition = field(default_factory=threading.Condition)
    _parts: dict[int, Tensor] = field(default_factory=dict)
    _sum: Tensor | None = None
    _round: int = 0
    _error: BaseException | None = None
    _place: threading.local = field(default_factory=threading.local)

    def add(self, part: Tensor) -> Tensor:
        """Wait for the parts of all calls; returns their sum, added up in the order of calls."""
        self._turn.release()
        try:
            with self._all:
                meeting = self._round
                self._parts[self._place.number] = part
                if len(self._parts) == self.count:
                    self._sum = torch.stack([self._parts[k] for k in sorted(self._parts)]).sum(0)
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
        for number, (group, stepper) in enumerate(calls):
            work = functools.partial(
                session.lockstep, group, policy, stepper, pipe=_copy(session.pipe)
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
        self._place.number = number
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
    return found


def _copy(pipe: Pipeline) -> Any:
    """A copy of a pipeline that shares its weights, with networks and a scheduler to attach to."""
    twin = copy.copy(pipe)
    parts: dict[str, Any] = {"scheduler": fresh_copy(pipe.scheduler)}
    parts |= {name: shallow_copy(module) for name, module in find_denoisers(pipe).items()}
    vars(twin).update(parts)
    return twin
