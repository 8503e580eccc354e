"""Record the full run of a pipeline: all latents and all combined outputs.

Looks on and changes nothing. The pipeline's arguments are passed through.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ertacache.core.gram import Schedule, Trajectory
from ertacache.core.groups import Layout
from ertacache.integration.branch import branch_output
from ertacache.integration.identity import current_guidance, find_denoisers
from ertacache.integration.layout import find_layout
from ertacache.integration.private_api import Pipeline
from ertacache.integration.schedulers import (
    SchedulerError,
    check_deterministic,
    first_step,
    read_schedule,
)
from ertacache.integration.tracker import NetworkCall, StepCall, check_plain, following

__all__ = ["NO_STEP", "Recording", "argument_default", "record", "takes_argument"]


@dataclass(frozen=True, eq=False)
class Recording:
    """A full run.

    Attributes:
        run: the latents x_0 ... x_T and outputs v_0 ... v_{T-1} as the scheduler saw them, each of
            shape (P, ...).
        schedule: what the scheduler does in it.
        expert_steps: the steps after 0 at which another network of the pipeline took over.
        guidance: guidance arguments of the call.
        layout: of the latents; None if it is not known.
        branch: whether the output of one guidance branch is there in the shape of the latent.
    """

    run: Trajectory
    schedule: Schedule
    expert_steps: tuple[int, ...]
    guidance: Mapping[str, tuple[float, ...]]
    layout: Layout | None
    branch: bool


def record(pipe: Pipeline, **call_kwargs: Any) -> Recording:
    """Run a pipeline once, without decoding, and keep its latents, outputs and sigma schedule.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        **call_kwargs: arguments of the pipeline; ``output_type`` is ``"latent"`` unless given.

    Raises:
        SchedulerError: if the scheduler adds noise, or the run did not take every step.
        RuntimeError: if a policy is attached to the scheduler or a network.
    """
    output = {"output_type": "latent"} if takes_argument(pipe, "output_type") else {}
    with following(pipe, find_denoisers(pipe), _Recorder) as runs:
        pipe(**(output | call_kwargs))
    if not runs:
        raise SchedulerError(NO_STEP)
    return runs[-1].result()


NO_STEP = (
    "the pipeline never called the step of its scheduler, but that of copies, or of none: no "
    "policy can follow such a run"
)


def takes_argument(pipe: Pipeline, name: str) -> bool:
    """Whether the call of a pipeline takes an argument of a name, also as ``**kwargs``."""
    known = _parameters(pipe)
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return anything or name in known or not known


def argument_default(pipe: Pipeline, name: str) -> object:
    """The default of an argument of a pipeline's call; None if there is none."""
    found = _parameters(pipe).get(name)
    return None if found is None or found.default is found.empty else found.default


def _parameters(pipe: Pipeline) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(type(pipe).__call__).parameters
    except (TypeError, ValueError):
        return {}  # a call that cannot be looked into


class _Recorder:
    """Follows one run and keeps what it sees."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe, self._scheduler = pipe, pipe.scheduler
        self.num_steps = len(self._scheduler.timesteps)
        check_deterministic(self._scheduler, num_steps=self.num_steps)
        self._schedule = read_schedule(self._scheduler)
        self._guidance: dict[str, tuple[float, ...]] = {}
        self._layout: Layout | None = None
        self._output: Any = None  # of the first call of the present step
        self._branch = True  # on every step so far
        self._latents: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._begins: dict[int, int] = {}  # network: first step

    def call(self, call: NetworkCall) -> Any:
        self._begins.setdefault(id(call.module), call.step)
        output = call.compute()
        if call.index == 0:
            self._output = output
        return output

    def step(self, call: StepCall) -> Any:
        check_plain(call, self._scheduler)
        if call.step == 0:  # a pipeline may have begun later, or changed the sigmas
            begin = first_step(self._scheduler, call.timestep)
            self._schedule = read_schedule(self._scheduler, begin=begin)
            self.num_steps = self._schedule.num_steps
            self._guidance = current_guidance(self._pipe)
            self._layout = find_layout(self._pipe, call.sample)
        raw = branch_output(self._output, call.sample, calls=call.calls)
        self._branch, self._output = self._branch and raw is not None, None
        # Copies: what a pipeline does to its latents later must not reach the record.
        self._latents[call.step :] = [call.sample.detach().clone()]
        self._outputs.append(call.model_output.detach().clone())
        result = call.original_step()
        self._latents.append(result[0].detach().clone())
        return result

    def end(self, *, failed: bool, restarted: bool) -> None:
        """Nothing to release."""

    def loop_left(self, *, failed: bool) -> None:
        """Nothing to report."""

    def result(self) -> Recording:
        if not self._outputs:
            raise SchedulerError(NO_STEP)
        if len(self._outputs) != self.num_steps:
            raise SchedulerError(
                f"the run took {len(self._outputs)} of the {self.num_steps} steps of its sigma "
                "schedule: only runs to the last step can be recorded"
            )
        run = Trajectory(tuple(self._latents), tuple(self._outputs))
        experts = tuple(sorted({*self._begins.values()} - {0}))
        return Recording(run, self._schedule, experts, self._guidance, self._layout, self._branch)
