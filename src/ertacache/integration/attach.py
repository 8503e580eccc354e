"""Attach a policy to a pipeline, use it, and let it go: ``attach``, ``using``, ``detach``.

On a reused step the network's calls return the cached outputs of the last computed step, and
``scheduler.step`` returns what the policy's stepper makes of them. ``tracker`` reports calls and
steps to ``run``, ``core.steppers`` has the methods; here a policy meets a pipeline.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

import torch
from torch import Tensor

from ertacache.core.plans import Target
from ertacache.core.sampler import Stepper
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.hub import open_policy
from ertacache.integration.choose import PlanChooser
from ertacache.integration.identity import check_pipeline, find_denoisers
from ertacache.integration.microbatch import MicroBatch
from ertacache.integration.private_api import Pipeline
from ertacache.integration.run import PolicyRun, RunSetup
from ertacache.integration.schedulers import StepForms, check_deterministic
from ertacache.integration.stats import RunStats, Stats, summarize
from ertacache.integration.tracker import Tracker, find_tracker
from ertacache.integration.warnings import RunWarnings

__all__ = ["Handle", "attach", "detach", "find_handle", "summary", "using"]

_LOG = logging.getLogger("ertacache")
_NOT_ATTACHED = "no policy is attached to this pipeline: call ertacache.attach first"
_IN_USE = (
    "this pipeline is in use already, and follows one request at a time: give every worker a "
    "pipeline of its own, or let requests wait for each other"
)


def attach(
    pipe: Pipeline,
    policy: Policy | str | os.PathLike[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    min_psnr: float | None = None,
    cache_device: str | torch.device | None = None,
) -> Handle:
    """Make every generation of a pipeline follow a policy, until ``detach``.

    A policy that is attached already is replaced, which is reported in one line. The handle
    follows one run at a time: a network that another pipeline uses too must not be used there
    before the run is over. A run is over when its loop is left, also by an exception; if the loop
    has no progress bar, a run broken off between steps is over with the next or ``detach``.

    Any number of steps, size, scheduler and target will do. A run for which the policy has a fitted
    plan follows that one; for any other a plan is solved from the profile when the run starts, and
    kept. Where none is predicted to help, every step is computed, with a warning.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        policy: the policy, the path of its file, or its place on the hub, such as
            ``hub:user/repo`` or ``hub:user/repo@revision``.
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps, in place of a speed-up.
        min_psnr: the fewest computed steps with this PSNR to the full run, in dB, measured or
            predicted. Without any of the three, runs follow the first plan of the policy, or get
            its speed-up.
        cache_device: where outputs are kept between steps, such as ``"cpu"`` to save the
            accelerator's memory; None keeps them where they are.

    Returns:
        The handle, which is also a context manager that detaches.

    Raises:
        PolicyError: if the policy was calibrated for another network or its file is damaged; a
            ``SchedulerError`` if no policy can work with the scheduler.
        ValueError: if there is more than one target, or it is out of range.
        RuntimeError: if another pipeline or a baseline uses the scheduler or the network.
    """
    target = Target(speedup, compute_steps, min_psnr)
    policy = open_policy(policy)
    device = None if cache_device is None else torch.device(cache_device)
    before = find_handle(pipe)
    if before is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when it is attached
            _check_attachable(pipe, policy)  # if it cannot be, the present one stays
        before.detach()
        _LOG.warning("replacing the attached policy: %r by %r", before.policy, policy)
    return Handle(pipe, policy, target=target, cache_device=device)


def detach(pipe: Pipeline) -> bool:
    """Give a pipeline its own behaviour back; the handle is not needed.

    Returns:
        Whether a policy was attached.
    """
    handle = find_handle(pipe)
    if handle is None:
        return False
    handle.detach()
    return True


def summary(pipe: Pipeline) -> str:
    """What the policy attached to a pipeline did so far, in a few lines.

    Raises:
        RuntimeError: if no policy is attached.
    """
    return _attached(pipe).summary()


@contextmanager
def using(
    pipe: Pipeline,
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    min_psnr: float | None = None,
) -> Iterator[Handle]:
    """Give the runs of a block another target, such as that of one request of a server.

    The target of before is restored when the block is left, also by an exception. Several
    pipelines may be used at once, each in a thread of its own.

    Args:
        pipe: a pipeline with an attached policy.
        speedup: at least this many times fewer computed steps than steps; 1 computes them all.
        compute_steps: this many computed steps, in place of a speed-up.
        min_psnr: the fewest computed steps with this PSNR to the full run, in dB. Without any of
            the three, runs follow the first plan of the policy, or get its speed-up.

    Yields:
        The handle of the attached policy.

    Raises:
        RuntimeError: if no policy is attached, or the pipeline is in such a block already, be it of
            another thread or of this one.
        ValueError: if there is more than one target, or it is out of range.
    """
    handle, target = _attached(pipe), Target(speedup, compute_steps, min_psnr)
    with handle._using(target):
        yield handle


def _attached(pipe: Pipeline) -> Handle:
    handle = find_handle(pipe)
    if handle is None:
        raise RuntimeError(_NOT_ATTACHED)
    return handle


def find_handle(pipe: Pipeline) -> Handle | None:
    """Return the handle of the policy that is attached to a pipeline, None if there is none."""
    tracker = find_tracker(pipe, find_denoisers(pipe))
    if tracker is None or tracker.pipe is not pipe or not isinstance(tracker.owner, Handle):
        return None
    return tracker.owner


def _check_attachable(pipe: Pipeline, policy: Policy) -> None:
    """Raise if a policy cannot be attached to a pipeline; warn of what may differ."""
    find_denoisers(pipe)
    steps = policy.plans[0].num_steps if policy.profile is None else policy.profile.num_steps
    check_deterministic(pipe.scheduler, num_steps=steps)
    check_pipeline(pipe, policy)


class Handle(AbstractContextManager["Handle"]):
    """A policy attached to a pipeline; also a context manager that detaches."""

    def __init__(
        self,
        pipe: Pipeline,
        policy: Policy,
        *,
        target: Target | None = None,
        cache_device: torch.device | None = None,
        stepper: Stepper | None = None,
        micro_batch: MicroBatch | None = None,
        chooser: PlanChooser | None = None,
        finished: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Check that the policy is for the pipeline, and attach it.

        Args:
            pipe: the pipeline.
            policy: the policy.
            target: of the runs; None takes the policy's first plan.
            cache_device: where outputs are kept between steps.
            stepper: takes the place of the plan's own stepper for one whole run.
            micro_batch: how calls of the network are split.
            chooser: of the same policy and target, with the plans that it has chosen before.
            finished: called with the last latent of every run, as the scheduler returns it.
        """
        _check_attachable(pipe, policy)
        self._chooser = chooser or PlanChooser(policy, target or Target())
        self._warnings = RunWarnings()
        self._setup = RunSetup(
            pipe=pipe,
            chooser=self._chooser,
            warnings=self._warnings,
            forms=StepForms(pipe.scheduler),
            cache_device=cache_device,
            stepper=stepper,
            finished=finished,
        )
        self._before = RunStats()  # all runs but the last
        self._runs: int = 0
        self._run: PolicyRun | None = None
        self._use = Lock()  # held in a block of ``using``
        self._tracker = Tracker(
            pipe,
            find_denoisers(pipe),
            start=self._start,
            owner=self,
            micro_batch=micro_batch,
            missed=self._warnings.warn_of_no_effect,
        )

    @property
    def policy(self) -> Policy:
        """The attached policy."""
        return self._chooser.policy

    @property
    def plan(self) -> FittedPlan | None:
        """The plan of the present or last run; None before the first, and if all was computed."""
        return None if self._run is None else self._run.plan

    @property
    def speedup(self) -> float | None:
        """Speed-up of the next run; None if the target is another. May be set between runs."""
        return self._chooser.target.speedup

    @speedup.setter
    def speedup(self, value: float | None) -> None:
        self._chooser.target = Target(speedup=value)

    @property
    def compute_steps(self) -> int | None:
        """Computed steps of the next run; None if the target is another. May be set, too."""
        return self._chooser.target.compute_steps

    @compute_steps.setter
    def compute_steps(self, value: int | None) -> None:
        self._chooser.target = Target(compute_steps=value)

    @property
    def min_psnr(self) -> float | None:
        """PSNR of the next run in dB; None if the target is another. May be set, too."""
        return self._chooser.target.min_psnr

    @min_psnr.setter
    def min_psnr(self, value: float | None) -> None:
        self._chooser.target = Target(min_psnr=value)

    @property
    def stats(self) -> Stats:
        """What the runs did so far; waits for the device if a run has just ended."""
        if not self._tracker.running:
            self._warnings.report()
        last = RunStats() if self._run is None else self._run.stats
        return Stats(self._runs, last, self._before + last)

    def summary(self) -> str:
        """Steps, network evaluations saved, seconds, speed-up, memory and schedule strip."""
        return summarize(self.stats, plan=self.plan)

    def detach(self) -> None:
        """Give the pipeline its own behaviour back, also in the middle of a run."""
        self._tracker.remove()
        self._warnings.report()

    def __exit__(self, *error: object) -> None:
        """Detach."""
        self.detach()

    @contextmanager
    def _using(self, target: Target) -> Iterator[None]:
        # Not to be waited for: requests in one thread, as of coroutines, would wait forever.
        if not self._use.acquire(blocking=False):
            raise RuntimeError(_IN_USE)
        before, self._chooser.target = self._chooser.target, target
        try:
            yield
        finally:
            self._chooser.target = before
            self._use.release()

    def _start(self) -> PolicyRun:
        self._warnings.report()
        run = PolicyRun(self._setup)
        if self._run is not None:
            self._before += self._run.stats
        self._runs, self._run = self._runs + 1, run
        return run
