"""Attach a policy to a pipeline: three touch points on instances, and nothing left on detach.

Brings the parts together; how a step is decided, computed and reused is theirs to know.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.compat import HookSeat, Pipeline, begin_index
from ertacache.integration.denoiser import DenoiserHook
from ertacache.integration.fingerprints import (
    check_pipeline,
    check_run,
    find_denoisers,
    run_differences,
    warn_of,
)
from ertacache.integration.probe import check_deterministic
from ertacache.integration.run import Run, Stats
from ertacache.integration.scheduler import SchedulerPatch, StepCall, check_plain
from ertacache.integration.updates import Update, make_update

__all__ = ["Handle", "attach"]


def attach(
    pipe: Pipeline,
    policy: Policy | str | os.PathLike[str],
    *,
    cache_device: str | torch.device | None = None,
) -> Handle:
    """Make every generation of a pipeline follow a policy, until ``detach()``.

    The handle follows one run at a time. A network that another pipeline uses too must not be used
    there before the run is over, or after it was broken off, before the next run or ``detach()``.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        policy: the policy, or the path of its file.
        cache_device: where outputs are kept between steps, such as ``"cpu"`` to spare the
            accelerator's memory; None keeps them where they are.

    Returns:
        The handle, which is also a context manager that detaches.

    Raises:
        PolicyError: if the policy was made for another pipeline or its file is damaged; a
            ``SchedulerError`` if no policy can work with the scheduler.
        RuntimeError: if a policy is attached to the pipeline's scheduler or network already.
    """
    if not isinstance(policy, Policy):
        policy = Policy.load(policy)
    device = None if cache_device is None else torch.device(cache_device)
    return Handle(pipe, policy, cache_device=device)


class Handle:
    """A policy attached to a pipeline."""

    def __init__(
        self,
        pipe: Pipeline,
        policy: Policy,
        *,
        cache_device: torch.device | None = None,
        update: Update | None = None,
    ) -> None:
        """Check that the policy is for the pipeline, and take the touch points.

        ``update`` takes the place of the one that the policy's plan asks for.
        """
        denoisers = find_denoisers(pipe)
        self._pipe, self._policy = pipe, policy
        self._scheduler = pipe.scheduler
        check_deterministic(self._scheduler, num_steps=policy.num_steps)
        check_pipeline(pipe, policy)
        self._update = update or make_update(policy, self._scheduler, cache_device=cache_device)
        self._run = Run(
            policy.compute_steps,
            num_steps=policy.num_steps,
            # A plan of trajectories was solved across the change of experts; the paper's was not.
            per_module=policy.method == "paper",
            cache_device=cache_device,
            held=self._update.held,
            check=self._check_call,
        )
        self._warned = False
        self._seats: list[HookSeat] = []
        self._undo = ExitStack()
        with ExitStack() as undo:
            patch = SchedulerPatch(self._scheduler, on_start=self._on_start, on_step=self._on_step)
            undo.callback(patch.remove)
            undo.callback(self._close)
            for module in denoisers.values():
                seat = HookSeat(module, DenoiserHook(self._run, abort=self._close))
                undo.callback(seat.remove)
                self._seats.append(seat)
            self._undo = undo.pop_all()

    @property
    def policy(self) -> Policy:
        """The attached policy."""
        return self._policy

    @property
    def stats(self) -> Stats:
        """What the runs did so far."""
        return self._run.stats

    def detach(self) -> None:
        """Give the pipeline its own behaviour back, also in the middle of a run."""
        self._undo.close()

    def __enter__(self) -> Handle:
        """Return the handle itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach."""
        self.detach()

    def _on_start(self) -> None:
        self._close(restore=False)
        check_run(self._scheduler, self._policy)
        for seat in self._seats:
            seat.ensure()
        self._update.start()
        self._run.start()

    def _on_step(self, call: StepCall) -> Any:
        step = self._run.step
        if step is None:
            return call.stock()
        try:
            self._check_step(step, call)
            result = self._update.step(step, call, computed=not self._run.reusing)
            finished = self._run.advance()
        except BaseException:
            self._close()
            raise
        if finished:
            self._close()
        return result

    def _close(self, *, restore: bool = True) -> None:
        self._run.close()
        self._update.close(restore=restore)

    def _check_call(self, step: int | None) -> None:
        if self._pipe.scheduler is not self._scheduler:
            raise RuntimeError("pipe.scheduler was replaced: detach, and attach the policy again")
        if step == 0 and begin_index(self._scheduler):
            raise PolicyError(_STARTS_LATE)

    def _check_step(self, step: int, call: StepCall) -> None:
        if self._run.calls == 0:
            raise RuntimeError(
                "scheduler.step was called, but none of the pipeline's networks before it: "
                "something took the hook away or replaced the network; detach and attach again"
            )
        if call.model_output.shape != call.sample.shape:
            raise PolicyError(
                f"the network's output has shape {tuple(call.model_output.shape)} and the latent "
                f"{tuple(call.sample.shape)}: a policy needs them to be equal"
            )
        if step == 0:
            self._check_first_step(call)

    def _check_first_step(self, call: StepCall) -> None:
        check_plain(call, self._scheduler)
        # Schedulers that were not told where to begin look the timestep up as well.
        if begin_index(self._scheduler) is None:
            timestep = torch.as_tensor(call.timestep).flatten()[0]
            if bool(timestep.to(self._scheduler.timesteps) != self._scheduler.timesteps[0]):
                raise PolicyError(_STARTS_LATE)
        if not self._warned:
            self._warned = True
            warn_of(run_differences(self._policy, self._pipe, sample=call.sample))


_STARTS_LATE = (
    "the run does not begin with step 0, as image to image does: the policy is for whole runs; "
    "detach it for this call"
)
