"""One interceptor: where a pipeline's run is, reported to an object that is made for each run.

The scheduler's ``set_timesteps`` starts a run, a hook sees every call of a network, ``step`` ends
each step, and the progress bar around the loop shows how the run was left. A loop that does without
``set_timesteps`` or ``step`` cannot be followed, which is reported. The instances keep their
classes and signatures; ``remove`` leaves no trace. What is done on a call or a step is up to
the follower: a policy, a recording, or a baseline.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ertacache.formats.policy import PolicyError
from ertacache.integration.microbatch import MicroBatch
from ertacache.integration.private_api import (
    CallEndWatcher,
    DetachedHook,
    HookRegistration,
    ModelHook,
    Pipeline,
    ProgressBarWatcher,
    Scheduler,
    find_hook,
    in_call,
)

__all__ = [
    "Follower",
    "NetworkCall",
    "StepCall",
    "Tracker",
    "check_plain",
    "find_tracker",
    "following",
    "untraced",
]

_PLAIN = frozenset({"model_output", "timestep", "sample", "return_dict", "generator"})
_MARK = "_ertacache"
_LOOP = 2  # calls of a network in one loop, at least
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep ``torch.compile`` out of a function, so that its counters do not become constants.

    What the function calls, the network among it, is still compiled.
    """
    skipped: _Function = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return skipped


@dataclass(frozen=True, eq=False)
class NetworkCall:
    """One call of a network within a run.

    Attributes:
        step: number of the run's step.
        index: number of the call within its step; more than one with sequential guidance.
        module: the network.
        args: its positional arguments.
        kwargs: its keyword arguments.
        forward: what to call.
    """

    step: int
    index: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    forward: Callable[..., Any]

    @property
    def batch(self) -> int:
        """The rows of its batch: those of the first tensor with rows among the arguments."""
        given = (*self.args, *self.kwargs.values())
        return next((len(one) for one in given if isinstance(one, Tensor) and one.ndim > 0), 1)

    def compute(self, rows: slice | None = None) -> Any:
        """Evaluate the network, on some rows of the batch only if ``rows`` are given."""
        if rows is None:
            return self.forward(*self.args, **self.kwargs)
        batch = self.batch

        def part(given: Any) -> Any:
            whole = isinstance(given, Tensor) and given.ndim > 0 and len(given) == batch
            return given[rows] if whole else given

        args = [part(given) for given in self.args]
        return self.forward(*args, **{name: part(v) for name, v in self.kwargs.items()})


@dataclass(frozen=True, eq=False)
class StepCall:
    """One call of ``scheduler.step``.

    Attributes:
        step: number of the run's step.
        calls: calls of networks in this step.
        bound: the arguments that were given, by name.
        original: the method as it was before.
    """

    step: int
    calls: int
    bound: inspect.BoundArguments
    original: Callable[..., Any]

    @property
    def model_output(self) -> Tensor:
        """The combined output v."""
        v: Tensor = self.bound.arguments["model_output"]
        return v

    @property
    def sample(self) -> Tensor:
        """The latent x."""
        x: Tensor = self.bound.arguments["sample"]
        return x

    @property
    def timestep(self) -> Any:
        """The timestep, as the pipeline passed it."""
        return self.bound.arguments["timestep"]

    @property
    def return_dict(self) -> bool:
        """Whether the caller wants the scheduler's output class."""
        return bool(self.bound.arguments.get("return_dict", True))

    def original_step(self, model_output: Tensor | None = None) -> Any:
        """Take the scheduler's own step, with this output in place of the one given."""
        if model_output is not None:
            self.bound.arguments["model_output"] = model_output
        return self.original(*self.bound.args, **self.bound.kwargs)


class Follower(Protocol):
    """Follows one run: made when the run starts, dropped when it is over."""

    @property
    def num_steps(self) -> int:
        """The number of steps after which the run is complete."""
        ...

    def call(self, call: NetworkCall) -> Any:
        """Return the output of a call of the network."""
        ...

    def step(self, call: StepCall) -> Any:
        """Return what ``scheduler.step`` is to return."""
        ...

    def end(self, *, failed: bool, restarted: bool) -> None:
        """The run is over, complete or not.

        Args:
            failed: whether an error ended it.
            restarted: whether ``set_timesteps`` was called for the next one already.
        """
        ...

    def loop_left(self, *, failed: bool) -> None:
        """The loop around the run was left, after its end."""
        ...


_Follower = TypeVar("_Follower", bound=Follower)


@dataclass(eq=False)
class _TrackedRun:
    """Where a run is."""

    follower: Follower
    step: int = 0
    calls: int = 0  # of networks in the present step
    looped: bool = False  # the progress bar around its loop was seen
    over: bool = False


class Tracker:
    """Follows the runs of a pipeline until ``remove``.

    Attributes:
        pipe: the pipeline.
        owner: whoever made the tracker.
    """

    def __init__(
        self,
        pipe: Pipeline,
        networks: Mapping[str, nn.Module],
        *,
        start: Callable[[], Follower],
        owner: object = None,
        micro_batch: MicroBatch | None = None,
        missed: Callable[[str, int], None] | None = None,
    ) -> None:
        """Patch the scheduler and hook the networks; raise if they are tracked already.

        Args:
            pipe: the pipeline.
            networks: its networks by name.
            start: makes the follower of a run, when the scheduler has its sigmas.
            owner: whoever made the tracker.
            micro_batch: how calls of the network are split; None leaves them whole.
            missed: called at the end of a loop that cannot be followed, with the method of the
                scheduler that it does not call, and the number of its calls of the network.
        """
        self.pipe, self.owner = pipe, owner
        self._scheduler = pipe.scheduler
        self._start, self._micro_batch, self._missed = start, micro_batch, missed
        self._run: _TrackedRun | None = None  # the present or last one
        self._begun = in_call(pipe)  # a run has begun in the present call of the pipeline
        self._loose = 0  # calls of networks before one has
        self._hooks: list[HookRegistration] = []
        with ExitStack() as undo:
            patch = _SchedulerPatch(self._scheduler, self)
            undo.callback(patch.remove)
            undo.callback(self._removed)
            undo.callback(ProgressBarWatcher(pipe, on_begin=self._begin_loop).remove)
            undo.callback(CallEndWatcher(pipe, on_end=self._end_call).remove)
            for module in networks.values():
                hook = HookRegistration(module, NetworkHook(self))
                undo.callback(hook.remove)
                self._hooks.append(hook)
            self._undo = undo.pop_all()

    def remove(self) -> None:
        """Leave scheduler, networks and pipeline as they were, also in the middle of a run."""
        self._undo.close()

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self._run is not None and not self._run.over

    def begin(self) -> None:
        """Start a run, whatever became of the one before."""
        calls = self._stepless()
        self._end(restarted=True)
        for hook in self._hooks:
            hook.ensure()
        self._begun, self._loose = True, 0
        self._run = _TrackedRun(self._start())
        self._report("step", calls)

    @untraced
    def call(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kw: Any) -> Any:
        """Report a call of a network."""
        if self.pipe.scheduler is not self._scheduler:
            self._end(failed=True)
            raise RuntimeError(
                "pipe.scheduler was replaced: call ertacache.detach(pipe), attach again"
            )
        if self._micro_batch is not None:
            forward = functools.partial(self._micro_batch.forward, module, forward)
        run = self._run
        if run is None or run.over:
            self._loose += not self._begun
            return forward(*args, **kw)
        call = NetworkCall(run.step, run.calls, module, args, kw, forward)
        run.calls += 1
        try:
            return run.follower.call(call)
        except BaseException:
            self._end(failed=True)
            raise

    def step(self, bound: inspect.BoundArguments, original: Callable[..., Any]) -> Any:
        """Report a call of ``scheduler.step``."""
        run = self._run
        if run is None or run.over:
            return original(*bound.args, **bound.kwargs)
        try:
            result = run.follower.step(StepCall(run.step, run.calls, bound, original))
        except BaseException:
            self._end(failed=True)
            raise
        run.step, run.calls = run.step + 1, 0
        if run.step == run.follower.num_steps:
            self._end()
        return result

    def _end(self, *, failed: bool = False, restarted: bool = False) -> None:
        run = self._run
        if run is not None and not run.over:
            run.over = True
            run.follower.end(failed=failed, restarted=restarted)

    def _begin_loop(self) -> Callable[[], None]:
        """Return what is to be called when the loop that begins now is left."""
        run, loose = self._run, self._loose
        if run is None or run.over:
            return lambda: self._report("set_timesteps", self._loose - loose)
        if run.looped:  # bars inside of a loop mean nothing
            return lambda: None
        run.looped, before = True, sys.exc_info()[1]

        def leave() -> None:
            if self._run is not run:  # a later run has begun since
                return
            # A run may begin while an error is handled, such as that of a larger one.
            failed = sys.exc_info()[1] not in (None, before)
            calls = self._stepless(least=_LOOP)
            self._end(failed=failed)
            run.follower.loop_left(failed=failed)
            self._report("step", calls)

        return leave

    def _end_call(self) -> None:
        """The call of the pipeline is over, without an error."""
        calls, loose, begun = self._stepless(least=_LOOP), self._loose, self._begun
        self._begun, self._loose = False, 0
        self._report("step", calls)
        self._report("set_timesteps", 0 if begun else loose)

    def _removed(self) -> None:
        calls, loose = self._stepless(), self._loose if self._run is None else 0
        self._end()
        self._report("step", calls)
        self._report("set_timesteps", 0 if self._begun else loose)

    def _stepless(self, *, least: int | None = None) -> int:
        """The calls of the network in a run without a step; 0 if it is none.

        Args:
            least: so many calls are a loop; by default one for every step, because a run whose end
                was not seen may have been broken off before its first step.
        """
        run = self._run
        if run is None or run.over or run.step > 0:
            return 0
        return run.calls if run.calls >= (least or run.follower.num_steps) else 0

    def _report(self, method: str, calls: int) -> None:
        """Report a loop that does not call a method of the scheduler, unless an error ended it."""
        if self._missed is not None and calls >= _LOOP and sys.exc_info()[0] is None:
            self._missed(method, calls)


class NetworkHook(ModelHook):
    """The hook on a network; reports its calls to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        """Report to ``tracker``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        """Copies of a network are not tracked."""
        return DetachedHook()

    @untraced
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``module.forward``."""
        return self.tracker.call(module, self.fn_ref.original_forward, args, kwargs)


class _SchedulerPatch:
    """``set_timesteps`` and ``step`` of one instance, replaced until ``remove``.

    The instance keeps its class, its signatures and its state; copies of it behave like the class.
    """

    def __init__(self, scheduler: Scheduler, tracker: Tracker) -> None:
        owner = getattr(vars(scheduler).get("step"), _MARK, None)
        if owner is not None and owner[0] != id(scheduler):  # a copy took our methods along
            _strip(scheduler)
        elif owner is not None:
            raise RuntimeError(
                f"ertacache is already attached to this {type(scheduler).__name__}: "
                "call ertacache.detach(pipe) on the pipeline it is attached to"
            )
        self._scheduler = scheduler
        names = ("set_timesteps", "step")
        self._before = {name: vars(scheduler)[name] for name in names if name in vars(scheduler)}
        scheduler.set_timesteps = _patched_set_timesteps(scheduler, tracker)
        scheduler.step = _patched_step(scheduler, tracker)

    def remove(self) -> None:
        _strip(self._scheduler)
        vars(self._scheduler).update(self._before)


def _strip(scheduler: Scheduler) -> None:
    for name in ("set_timesteps", "step"):
        vars(scheduler).pop(name, None)


def _patched_set_timesteps(mine: Scheduler, tracker: Tracker) -> MethodType:
    original = mine.set_timesteps

    @functools.wraps(type(mine).set_timesteps)
    def set_timesteps(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if self is not mine:  # a copy of the instance took the method along
            return type(self).set_timesteps(self, *args, **kwargs)
        result = original(*args, **kwargs)
        tracker.begin()
        return result

    return MethodType(set_timesteps, mine)


def _patched_step(mine: Scheduler, tracker: Tracker) -> MethodType:
    original = mine.step
    # The class's own: a method that someone put on the instance may take anything.
    signature = inspect.signature(MethodType(type(mine).step, mine))

    @functools.wraps(type(mine).step)
    def step(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if self is not mine:
            return type(self).step(self, *args, **kwargs)
        return tracker.step(signature.bind(*args, **kwargs), original)

    setattr(step, _MARK, (id(mine), weakref.ref(tracker)))
    return MethodType(step, mine)


@contextmanager
def following(
    pipe: Pipeline, networks: Mapping[str, nn.Module], make: Callable[[Pipeline], _Follower]
) -> Iterator[list[_Follower]]:
    """Follow the runs of a pipeline within the block; yields what was made for each of them."""
    runs: list[_Follower] = []

    def start() -> _Follower:
        runs.append(make(pipe))
        return runs[-1]

    tracker = Tracker(pipe, networks, start=start)
    try:
        yield runs
    finally:
        tracker.remove()


def find_tracker(pipe: Pipeline, networks: Mapping[str, nn.Module]) -> Tracker | None:
    """Return the tracker of a pipeline's scheduler or of one of its networks, if there is one."""
    mark = getattr(vars(pipe.scheduler).get("step"), _MARK, None)
    if mark is not None and mark[0] == id(pipe.scheduler):
        tracker: Tracker | None = mark[1]()
        return tracker
    hooks = (find_hook(module) for module in networks.values())
    return next((hook.tracker for hook in hooks if isinstance(hook, NetworkHook)), None)


def check_plain(call: StepCall, scheduler: Scheduler) -> None:
    """Raise if a step is called with noise or anything else that the methods do not see."""
    parameters = inspect.signature(type(scheduler).step).parameters
    for name, value in call.bound.arguments.items():
        if name in _PLAIN or value is None or name not in parameters:
            continue
        default = parameters[name].default
        if isinstance(value, Tensor) or value != default:
            raise PolicyError(
                f"the pipeline passes {name} to {type(scheduler).__name__}.step, which changes the "
                f"step in a way that no policy sees: leave it at {default!r}"
            )
