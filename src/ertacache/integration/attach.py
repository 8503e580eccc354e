"""Attach a policy to a pipeline: three touch points on instances, and nothing left on detach.

Brings the parts together; how a step is decided, computed and reused is theirs to know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.attachment import Attachment
from ertacache.integration.compat import HookSeat, LoopSeat, Pipeline, begin_index, clear_history
from ertacache.integration.denoiser import DenoiserHook
from ertacache.integration.fingerprints import (
    check_pipeline,
    check_run,
    find_denoisers,
    model_name,
    run_differences,
    warn_of,
)
from ertacache.integration.guards import Guards
from ertacache.integration.parts import Parts, find_step
from ertacache.integration.probe import check_deterministic
from ertacache.integration.run import Run, Stats
from ertacache.integration.scheduler import SchedulerPatch, StepCall, check_plain
from ertacache.integration.updates import Update, check_fits

__all__ = ["Handle", "attach"]


def attach(
    pipe: Pipeline,
    policy: Policy | str | os.PathLike[str],
    *,
    cache_device: str | torch.device | None = None,
) -> Handle:
    """Make every generation of a pipeline follow a policy, until ``detach()``.

    The handle follows one run at a time: a network that another pipeline uses too must not be used
    there before the run is over. A run is over when its loop is left, also by an exception; if the
    loop has no progress bar, a run broken off between steps is over with the next or ``detach()``.

    A run on the last steps of the policy's table, as image to image is, gets a policy of its own,
    solved from the profile in the policy, if the scheduler takes steps of first order.

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


class Handle(Attachment):
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
        self._parts = Parts(pipe, policy, cache_device=cache_device, update=update)
        self._first = self._loop = 0
        _, self._update = self._parts.get(0, begin=0)
        self._run = Run(
            policy.compute_steps,
            num_steps=policy.num_steps,
            # Coefficients of trajectories are for the planned outputs, and no other.
            per_module=policy.method == "paper",
            cache_device=cache_device,
            held=lambda: self._update.held(),
            check=self._check_call,
        )
        self._warned = self._stock = False
        self._guards = Guards()
        self._seats: list[HookSeat] = []
        super().__init__(ExitStack())
        with ExitStack() as undo:
            patch = SchedulerPatch(self._scheduler, on_start=self._on_start, on_step=self._on_step)
            undo.callback(self._guards.report)
            undo.callback(patch.remove)
            undo.callback(self._close)
            undo.callback(LoopSeat(pipe, on_begin=self._loop_end).remove)
            for module in denoisers.values():
                seat = HookSeat(module, DenoiserHook(self._run, abort=self._fail))
                undo.callback(seat.remove)
                self._seats.append(seat)
            self._undo = undo.pop_all()

    @property
    def policy(self) -> Policy:
        """The attached policy."""
        return self._policy

    @property
    def stats(self) -> Stats:
        """What the runs did so far; waits for the device if a run has just ended."""
        if self._run.step is None:
            self._guards.report()
        return self._run.stats

    def _on_start(self) -> None:
        self._close(restore=False)
        self._guards.report()
        self._first = check_run(self._scheduler, self._policy, model=model_name(self._pipe))
        for seat in self._seats:
            seat.ensure()
        self._follow(self._first, begin=0)
        self._stock = False
        self._run.start()

    def _follow(self, first: int, *, begin: int) -> None:
        """Let the run begin with step ``first`` of the policy's table, ``begin`` of its own."""
        policy, self._update = self._parts.get(first, begin=begin)
        self._update.start()
        self._run.follow(policy.compute_steps, num_steps=policy.num_steps)

    def _loop_end(self) -> Callable[[], None]:
        """Return what is to be called when the loop that begins now is left."""
        number = self._run.number
        inner, self._loop = self._loop == number, number

        def end() -> None:
            # Bars inside of a loop mean nothing, and a later run may have begun since.
            if self._run.number != number or inner:
                return
            self._close()
            if sys.exc_info()[0] is None:
                self._guards.report()
            else:
                self._guards.forget()

        return end

    def _on_step(self, call: StepCall) -> Any:
        step = self._run.step
        if step is None:
            return call.stock()
        try:
            self._check_step(step, call)
            result = self._take(step, call)
            finished = self._run.advance()
        except BaseException:
            self._fail()
            raise
        if finished:
            self._guards.watch_latent(result[0])
            self._close()
        return result

    def _take(self, step: int, call: StepCall) -> Any:
        computed = not self._run.reusing
        if computed:
            self._guards.watch_output(step, call.model_output)
        return call.stock() if self._stock else self._update.step(step, call, computed=computed)

    def _leave(self) -> None:
        """Follow the plan no longer: what it remembers does not fit the latent."""
        self._run.compute_rest()
        clear_history(self._scheduler)  # nor does what a multistep scheduler remembers
        # The paper's plan goes on with its table; the other takes no step without its history.
        self._stock = self._policy.method == "trajectory"

    def _fail(self) -> None:
        self._guards.forget()
        self._close()

    def _close(self, *, restore: bool = True) -> None:
        self._run.close()
        self._update.close(restore=restore)

    def _check_call(self, step: int | None) -> None:
        if self._pipe.scheduler is not self._scheduler:
            raise RuntimeError("pipe.scheduler was replaced: detach, and attach the policy again")
        begin = begin_index(self._scheduler)
        if step == 0 and begin:
            self._follow(self._first + begin, begin=begin)

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
        else:
            self._check_later_step(step, call)

    def _check_later_step(self, step: int, call: StepCall) -> None:
        held = next(iter(self._update.held()), call.sample)
        if held.shape != call.sample.shape and not self._stock:
            self._guards.tell_shape(step, now=call.sample.shape, before=held.shape)
            self._leave()
        elif self._run.reshaped:
            self._guards.tell_input(step)
        elif self._run.reusing and self._run.calls != self._run.expected:
            self._guards.tell_calls(step, now=self._run.calls, before=self._run.expected)

    def _check_first_step(self, call: StepCall) -> None:
        check_plain(call, self._scheduler)
        check_fits(self._policy.plan, call.sample)
        # Schedulers that were not told where to begin look the timestep up as well.
        if begin_index(self._scheduler) is None:
            table = self._scheduler.timesteps
            timestep = torch.as_tensor(call.timestep).flatten()[0].to(table)
            if bool(timestep != table[0]):
                begin = find_step(table, timestep)
                self._follow(self._first + begin, begin=begin)
        if not self._warned:
            self._warned = True
            warn_of(run_differences(self._policy, self._pipe, sample=call.sample))
