"""One run under a policy: which steps reuse, what is cached, what ``scheduler.step`` returns.

Made fresh for every run by the handle and driven by the tracker; the method is the stepper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.core.groups import ONE_GROUP, Layout
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.sampler import Stepper
from ertacache.core.steppers import FullStepper, combine, make_stepper
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import PolicyError
from ertacache.integration.branch import branch_output, tensors_of
from ertacache.integration.choose import PlanChooser
from ertacache.integration.identity import (
    current_guidance,
    refuse_differences,
    run_differences,
    warn_of_differences,
)
from ertacache.integration.layout import find_layout
from ertacache.integration.private_api import (
    Pipeline,
    begin_index,
    call_arguments,
    clear_history,
    set_step_index,
)
from ertacache.integration.schedulers import SigmaAdjustment, StepForms, first_step
from ertacache.integration.stats import RunStats
from ertacache.integration.tracker import NetworkCall, StepCall, check_plain, untraced
from ertacache.integration.warnings import RunWarnings

__all__ = ["PolicyRun", "RunSetup", "held_bytes"]


@dataclass(frozen=True, eq=False)
class RunSetup:
    """What the runs of a handle have in common.

    Attributes:
        pipe: the pipeline.
        chooser: has the policy and chooses its plan for a run.
        warnings: those of the handle.
        forms: of the scheduler's results.
        cache_device: where outputs are kept; None leaves them where they are.
        stepper: takes the place of the plan's own for one whole run.
        finished: called with the last latent of a run; None if nobody wants it.
    """

    pipe: Pipeline
    chooser: PlanChooser
    warnings: RunWarnings
    forms: StepForms
    cache_device: torch.device | None
    stepper: Stepper | None
    finished: Callable[[Tensor], None] | None = None


class PolicyRun:
    """One run under a policy: decides on each step, and keeps what is reused."""

    def __init__(self, setup: RunSetup) -> None:
        """Begin a run on the sigmas that ``set_timesteps`` just made."""
        self._setup, self._scheduler = setup, setup.pipe.scheduler
        self.num_steps = len(self._scheduler.timesteps)
        self.plan: FittedPlan | None = None  # None computes every step
        self._begin = -1  # the scheduler's step with which the run begins, not known yet
        self._stepper: Stepper = setup.stepper or FullStepper(self.num_steps)
        self._adjustment: SigmaAdjustment | None = None
        if setup.stepper is not None or setup.chooser.adjusts_sigmas:
            # The pipeline must see the sigmas of the plan.
            self._follow(0)
            self._adjust()
        self._reusing = False  # the present step
        self._reshaped = False  # the present step's input has another shape than the cached one
        self._abandoned = False  # the plan is no longer followed
        self._as_calibrated = False  # with the arguments of the calibrated runs, and no callback
        self._outputs = _OutputCache(setup.cache_device)
        self._raw: Tensor | None = None  # output of one guidance branch, on the present step
        self._fresh = 0  # calls of the present step that were computed
        self._expected = 0  # calls of the last computed step
        self._computed_steps = self._reused_steps = self._reused_calls = 0
        self._calls, self._seconds = 0, 0.0
        self._final: RunStats | None = None  # of a run that is over

    # Called within the network's call, but not to be compiled with it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _follow(self, begin: int) -> None:
        """Choose the plan of a run that begins with the scheduler's step ``begin``."""
        setup = self._setup
        self._begin, self.num_steps = begin, len(self._scheduler.timesteps) - begin
        if setup.stepper is not None:
            self.plan = setup.chooser.policy.default
            return
        self._set_plan(setup.chooser.choose(self._scheduler, begin=begin))

    def _set_plan(self, plan: FittedPlan | None) -> None:
        self.plan, device = plan, self._setup.cache_device
        self._stepper = FullStepper(self.num_steps)
        if plan is not None:
            if plan.guided is not None:
                self.plan = plan = plan.at(current_guidance(self._setup.pipe))
            self._stepper = make_stepper(plan.plan, layout=self._layout, cache_device=device)

    def _layout(self, latents: Tensor) -> Layout:
        found = find_layout(self._setup.pipe, latents)
        assert found is not None  # otherwise the plan is not followed
        return found

    def _adjust(self) -> None:
        """Give the run the sigmas of its stepper, if it has its own."""
        sigmas, plan = self._stepper.sigmas, self.plan
        if sigmas is None or plan is None or torch.equal(sigmas, plan.sigmas):
            return
        self._adjustment = SigmaAdjustment(self._scheduler, sigmas, nominal=plan.sigmas)
        self._adjustment.install()

    @property
    def stats(self) -> RunStats:
        """Counts so far."""
        return self._final or RunStats(
            self._computed_steps,
            self._reused_steps,
            self._calls,
            self._seconds,
            held_bytes([*self._outputs.values(), *self._stepper.held()]),
            self._reused_calls,
        )

    # The network

    @untraced
    def call(self, call: NetworkCall) -> Any:
        """Return the cached output of a call on a reused step, otherwise evaluate the network."""
        if call.index == 0:
            self._decide(call)
        if self._reusing and self._outputs.has(call.index):
            self._reused_calls += 1
            return self._outputs.get(call.index)
        begin = perf_counter()
        output = call.compute()
        self._seconds += perf_counter() - begin
        self._calls, self._fresh = self._calls + 1, self._fresh + 1
        return self._outputs.put(call.index, output)

    def _decide(self, call: NetworkCall) -> None:
        """Decide at the first call of a step whether the step is reused."""
        # Where a run begins that was not announced, its first step shows; it is computed anyway.
        begin = begin_index(self._scheduler) if call.step == 0 else None
        if begin is not None and begin != self._begin:
            self._follow(begin)
        planned = self._abandoned or self._stepper.computes(call.step)
        switched = self._outputs.owner is not call.module
        if switched and not planned and not self._stepper.flexible:
            raise PolicyError(
                f"the pipeline goes on with another network at step {call.step}, which the plan "
                "reuses, but a network has to begin with a computed step: calibrate at these "
                "settings"
            )
        if switched:
            self._stepper.switch()
        shapes = _input_shapes(call.args, call.kwargs)
        self._fresh, self._reusing = 0, not planned and not switched
        self._reshaped = self._reusing and shapes != self._outputs.shapes
        if not self._reusing or self._reshaped:
            self._outputs.clear(call.module, shapes)

    # The scheduler

    def step(self, call: StepCall) -> Any:
        """Return the update of a step in the scheduler's form."""
        self._check_step(call)
        self._check_parts(call)
        if not self._reusing:
            self._setup.warnings.watch_output(call.step, call.model_output)
        result = self._take(call)
        if not self._reusing or self._fresh == call.calls:
            self._computed_steps, self._expected = self._computed_steps + 1, call.calls
        else:
            self._reused_steps += 1
        self._reusing = self._reshaped = False
        if call.step + 1 == self.num_steps:
            self._setup.warnings.watch_latent(result[0])
            if self._setup.finished is not None:
                self._setup.finished(result[0])
        return result

    def _take(self, call: StepCall) -> Any:
        if self._abandoned and not self._stepper.flexible:
            return call.original_step()
        x = call.sample.to(torch.promote_types(call.sample.dtype, torch.float32))
        own: list[Any] = []  # the scheduler's result, if its own step was taken

        def advance(v: Tensor) -> Tensor:
            adjustment = self._adjustment
            row = None if adjustment is None else adjustment.first_order(call.step)
            if row is not None:
                clear_history(self._scheduler)
                return combine(x, [v], row)
            own.append(call.original_step(v.to(call.model_output.dtype)))
            latent: Tensor = own[0][0]
            return latent

        v = None if self._reusing else call.model_output.detach()
        if self._raw is not None:
            self._stepper.note_branch(self._raw)
            self._raw = None
        latent = self._stepper.step(call.step, x, v, advance)
        if own and own[0][0] is latent:
            return own[0]
        set_step_index(self._scheduler, self._begin + call.step + 1)
        return self._setup.forms.fill(
            latent,
            model_output=call.model_output,
            sample=call.sample,
            return_dict=call.return_dict,
        )

    def _branch(self, call: StepCall) -> Tensor | None:
        """The raw output of one guidance branch in a computed step."""
        if not self._outputs.has(0):
            return None
        return branch_output(self._outputs.get(0), call.sample, calls=call.calls)

    def _check_step(self, call: StepCall) -> None:
        if call.calls == 0:
            raise RuntimeError(
                "scheduler.step was called, but none of the pipeline's networks before it: "
                "something removed the hook or replaced the network; detach and attach again"
            )
        if call.model_output.shape != call.sample.shape:
            raise PolicyError(
                f"the network's output has shape {tuple(call.model_output.shape)} and the latent "
                f"{tuple(call.sample.shape)}: a policy needs them to be equal"
            )
        if call.step == 0:
            self._check_first_step(call)
        else:
            self._check_later_step(call)

    def _check_first_step(self, call: StepCall) -> None:
        setup = self._setup
        check_plain(call, self._scheduler)
        begin = first_step(self._scheduler, call.timestep)
        if begin != self._begin:
            self._follow(begin)
        if self._stepper.num_steps != self.num_steps:
            raise PolicyError(
                f"the run has {self.num_steps} steps, but this calibration is for "
                f"{self._stepper.num_steps}: leave strength, sigmas= and timesteps= as they were"
            )
        if self.plan is not None:
            try:
                self.plan.plan.check_shape(tuple(call.sample.shape[1:]))
            except ValueError as cause:
                raise PolicyError(str(cause)) from None
        found = run_differences(setup.chooser.policy, setup.pipe, sample=call.sample)
        refuse_differences(found)
        warn_of_differences([d for d in found if setup.warnings.first(f"difference: {d.field}")])
        # Guidance that the pipeline itself changes on its way was calibrated with; what a callback
        # does is not known.
        callback = call_arguments(setup.pipe).get("callback_on_step_end")
        same = all(difference.level == "note" for difference in found)
        same &= setup.chooser.policy.fingerprint.pipeline == type(setup.pipe).__name__
        self._as_calibrated = same and (callback is None or callback.value is None)

    def _check_parts(self, call: StepCall) -> None:
        """Find what the plan of a computed step combines; if it is not there, compute the rest."""
        if self._reusing or self._abandoned:
            return
        own, plan = self._setup.stepper is not None, self._trajectory_plan()
        if own or (plan is not None and plan.branch):
            self._raw = self._branch(call)
        if own or plan is None:
            return
        if plan.branch and self._raw is None:
            self._leave_branch(call.step)
            plan = self._trajectory_plan()
        unknown = call.step == 0 and plan is not None and plan.groups != ONE_GROUP
        if unknown and find_layout(self._setup.pipe, call.sample) is None:
            self._setup.warnings.warn_of_layout(tuple(call.sample.shape))
            self._raw = None
            self._set_plan(None)

    def _leave_branch(self, step: int) -> None:
        """Go on without guidance: from the first step with another plan, later with none."""
        if step > 0:
            self._setup.warnings.warn_of_branch(step)
            self._abandon()
            return
        single = self._setup.chooser.without_branch()
        found = single.choose(self._scheduler, begin=self._begin)
        if found is None or getattr(found.plan, "branch", False):
            self._setup.warnings.warn_of_branch(step)
            found = None
        else:
            self._setup.warnings.warn_of_no_guidance()
        self._set_plan(found)

    def _trajectory_plan(self) -> TrajectoryPlan | None:
        plan = None if self.plan is None else self.plan.plan
        return plan if isinstance(plan, TrajectoryPlan) else None

    def _check_later_step(self, call: StepCall) -> None:
        reporter = self._setup.warnings
        held = next(iter(self._stepper.held()), call.sample)
        if held.shape != call.sample.shape and not self._abandoned:
            reporter.warn_of_shape(call.step, now=call.sample.shape, before=held.shape)
            self._abandon()
        elif self._as_calibrated:
            return
        elif self._reshaped:
            reporter.warn_of_input(call.step)
        elif self._reusing and call.calls != self._expected:
            reporter.warn_of_calls(call.step, now=call.calls, before=self._expected)

    def _abandon(self) -> None:
        """Compute the rest of the run by the scheduler, as from its first step."""
        self._abandoned, self._reusing = True, False
        clear_history(self._scheduler)  # of another shape, or from before the plan's steps

    def end(self, *, failed: bool, restarted: bool) -> None:
        """Release the cache, and put the scheduler's own sigmas back unless it has new ones."""
        self._final = self.stats
        del self._outputs, self._stepper
        if self._adjustment is not None and not restarted:
            self._adjustment.restore()
        if failed:
            self._setup.warnings.forget()

    def loop_left(self, *, failed: bool) -> None:
        """Report what was watched, now that nothing waits for the device."""
        if failed:
            self._setup.warnings.forget()
        else:
            self._setup.warnings.report()


class _OutputCache:
    """The raw outputs of the last computed step, call by call, whatever their structure.

    Attributes:
        owner: the network that they are of; None before the first call.
        shapes: of its input; an output for an input of another shape is not reused.
    """

    def __init__(self, device: torch.device | None) -> None:
        """Keep outputs on ``device``; None leaves them where they are."""
        self.owner: nn.Module | None = None
        self.shapes: tuple[torch.Size, ...] = ()
        self._device = device
        self._origin: torch.device | None = None
        self._outputs: dict[int, Any] = {}

    def clear(self, owner: nn.Module, shapes: tuple[torch.Size, ...]) -> None:
        """Begin with the outputs of another step."""
        self.owner, self.shapes, self._outputs = owner, shapes, {}

    def has(self, index: int) -> bool:
        """Whether the output of a call is there."""
        return index in self._outputs

    def get(self, index: int) -> Any:
        """The output of a call, on the device it came from."""
        output, origin = self._outputs[index], self._origin
        return output if origin is None else _map(output, lambda tensor: tensor.to(origin))

    def put(self, index: int, output: Any) -> Any:
        """Keep the output of a call, and return it in memory of its own.

        A network may return outputs in memory that its next call overwrites, as CUDA graphs do.
        """
        output = _map(output, lambda tensor: tensor.detach().clone())
        device = self._device
        if device is None:
            self._outputs[index] = output
        else:
            self._origin = next((tensor.device for tensor in tensors_of(output)), None)
            self._outputs[index] = _map(output, lambda tensor: tensor.to(device))
        return output

    def values(self) -> Iterable[Any]:
        """All outputs."""
        return self._outputs.values()


def _input_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Size, ...]:
    """Shapes of a network's latent: its first argument, or one with one of two names.

    Example:
        >>> _input_shapes((torch.ones(2, 3), torch.ones(2)), {})
        (torch.Size([2, 3]),)
        >>> _input_shapes((), {"sample": None})
        ()
    """
    named = (kwargs[name] for name in ("hidden_states", "sample") if name in kwargs)
    latent = next(named, None)
    if latent is None:
        latent = next(iter((*args, *kwargs.values())), None)
    return tuple(tensor.shape for tensor in tensors_of(latent))


def _map(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, Mapping):  # also diffusers' output classes
        return type(output)(**{key: _map(value, change) for key, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)(_map(value, change) for value in output)
    return output


def held_bytes(outputs: Iterable[Any]) -> int:
    """Return the bytes behind nested outputs, memory shared by several tensors counted once.

    Example:
        >>> x = torch.zeros(4)
        >>> held_bytes([x, (x[:2], torch.zeros(1))])
        20
    """
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in tensors_of(outputs)
    }
    return sum(storages.values())
