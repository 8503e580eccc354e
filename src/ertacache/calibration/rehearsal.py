"""A pipeline of one's own, run once before anything is profiled: what it lacks is named at once.

The network is evaluated once, and its output returned again in all other calls. So the whole run is
seen, from the prompt to the decoded result, at the price of one evaluation. Pipelines of diffusers
itself need no rehearsal.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor

from ertacache.calibration.outputs import results_of
from ertacache.calibration.session import Session
from ertacache.formats.policy import PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import find_denoisers
from ertacache.integration.private_api import Pipeline
from ertacache.integration.record import NO_STEP, argument_default, takes_argument
from ertacache.integration.schedulers import SchedulerError, first_step
from ertacache.integration.tracker import NetworkCall, StepCall, following

__all__ = ["check_call", "rehearse"]

ARGUMENTS = {
    "prompt": "what is to be generated",
    "generator": "with which every prompt gets its own noise",
    "num_inference_steps": "with which it is compared with fewer steps",
}
"""What the call of a pipeline must take, and why."""

OUTPUT_TYPES = ("pt", "np", "pil")
_KNOWN = ("diffusers.", "ertacache.")  # modules whose pipelines are not rehearsed
_REFUSALS = (TypeError, ValueError, KeyError, AttributeError, IndexError, NotImplementedError)
_SLACK = 0.1  # by which decoded values may exceed 0 to 1


def rehearse(session: Session, run: ProfiledPrompt, *, lockstep: bool) -> int | None:
    """See whether a session's pipeline can be calibrated; the session keeps how it is called.

    Args:
        session: the pipeline.
        run: a prompt with its seed.
        lockstep: whether several prompts are to go through one call of it.

    Returns:
        The number of steps of a full run; None if it is not known beforehand.

    Raises:
        TypeError: if the pipeline has no scheduler or no network.
        ValueError: if its call lacks an argument, or its result cannot be compared.
    """
    pipe = session.pipe
    check_call(pipe, *ARGUMENTS)
    if type(pipe).__module__.startswith(_KNOWN):
        steps = session.call.get("num_inference_steps") or argument_default(
            pipe, "num_inference_steps"
        )
        return steps if isinstance(steps, int) else None
    seen = _choose_output(session, run)
    session.evaluations.add("profile", 1)
    if lockstep or session.batch_size > 1:
        _try_two(session, run, rows=seen.rows)
    return seen.num_steps


def check_call(pipe: Pipeline, *names: str) -> None:
    """Raise unless a pipeline has a scheduler and a network, and its call takes some arguments."""
    find_denoisers(pipe)
    for name in names:
        if not takes_argument(pipe, name):
            raise ValueError(
                f"{type(pipe).__name__}.__call__ takes no {name}, {ARGUMENTS[name]}: add this "
                "argument"
            )


def _choose_output(session: Session, run: ProfiledPrompt) -> _Rehearsal:
    """Run one prompt with the first output type that the pipeline knows."""
    if not takes_argument(session.pipe, "output_type"):
        return _run_one(session, run)
    refused: Exception | None = None
    for session.output_type in OUTPUT_TYPES:
        try:
            return _run_one(session, run)
        except PolicyError:
            raise
        except _REFUSALS as error:
            refused = refused or error
    session.output_type = OUTPUT_TYPES[0]
    assert refused is not None
    raise refused  # of the first: it is not about the output


def _run_one(session: Session, run: ProfiledPrompt) -> _Rehearsal:
    pipe = session.pipe
    with following(pipe, find_denoisers(pipe), _Rehearsal) as runs:
        result = session.run([run], output_type=session.output_type)
    if not runs or runs[-1].steps == 0:
        raise SchedulerError(NO_STEP)
    _check_result(pipe, result)
    return runs[-1]


def _check_result(pipe: Pipeline, result: Any) -> None:
    """Raise unless a result is one image or video; warn if its values are not from 0 to 1."""
    name = type(pipe).__name__
    try:
        pixels = results_of(result)
    except (*_REFUSALS, RuntimeError) as error:
        raise ValueError(
            f"{name} returns a {type(result).__name__} that holds no images: return a tensor, an "
            "array or a list of images, or a tuple or output class that begins with one"
        ) from error
    if len(pixels) != 1 or pixels.ndim < 3:
        raise ValueError(
            f"{name} returns results of shape {tuple(pixels.shape)} for one prompt: return a "
            "batch, one image or video for every prompt"
        )
    low, high = pixels.min().item(), pixels.max().item()
    if low < -_SLACK or high > 1 + _SLACK:
        warnings.warn(
            f"the results of {name} have values from {low:.3g} to {high:.3g}: PSNR is measured as "
            "if they were from 0 to 1; return decoded images to compare it with that of others",
            stacklevel=2,
        )


def _try_two(session: Session, run: ProfiledPrompt, *, rows: int) -> None:
    """Call the pipeline with two prompts up to its network; if it cannot, they run one by one."""
    pipe, refused = session.pipe, ""
    seen: list[int] = []
    two = [run, replace(run, seed=run.seed + 1)]
    try:
        with following(pipe, find_denoisers(pipe), lambda pipe: _UpToNetwork(pipe, seen)):
            session.run(two, output_type=session.output_type)
    except _SeenError:
        if seen[-1] != 2 * rows:
            refused = f"two prompts make a batch of {seen[-1]} in its network, one of {rows}"
    except (*_REFUSALS, RuntimeError, AssertionError) as error:
        refused = f"{type(error).__name__}: {error}"
    if refused and session.batch_size > 1:
        raise ValueError(
            f"{type(pipe).__name__} takes one prompt at a time ({refused}): use batch_size=1"
        )
    session.one_by_one = bool(refused)


class _Rehearsal:
    """Follows one run: the network is evaluated once for every shape of its input.

    Attributes:
        num_steps: of the run.
        steps: taken so far.
        rows: of the batch in the first call of the network.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._scheduler = pipe.scheduler
        self.num_steps = len(self._scheduler.timesteps)
        self.steps = self.rows = 0
        self._outputs: dict[object, Any] = {}

    def call(self, call: NetworkCall) -> Any:
        self.rows = self.rows or call.batch
        given = (*call.args, *call.kwargs.values())
        shapes = tuple(one.shape for one in given if isinstance(one, Tensor))
        key = id(call.module), shapes
        if key not in self._outputs:
            self._outputs[key] = call.compute()
        return self._outputs[key]

    def step(self, call: StepCall) -> Any:
        if call.calls == 0:
            raise PolicyError(
                "scheduler.step was called, but none of the pipeline's networks before it: call "
                "the network itself, with its hooks, not its forward"
            )
        if not isinstance(call.model_output, Tensor) or not isinstance(call.sample, Tensor):
            raise PolicyError("scheduler.step must get the model output and the latent as tensors")
        if call.model_output.shape != call.sample.shape:
            raise PolicyError(
                f"the network's output has shape {tuple(call.model_output.shape)} and the latent "
                f"{tuple(call.sample.shape)}: a policy needs them to be equal"
            )
        if call.step == 0:
            self.num_steps -= first_step(self._scheduler, call.timestep)
        self.steps += 1
        return call.original_step()

    def end(self, *, failed: bool, restarted: bool) -> None:
        """Nothing to release."""

    def loop_left(self, *, failed: bool) -> None:
        """Nothing to report."""


class _UpToNetwork(_Rehearsal):
    """Follows a run up to its first call of the network."""

    def __init__(self, pipe: Pipeline, seen: list[int]) -> None:
        super().__init__(pipe)
        self._seen = seen

    def call(self, call: NetworkCall) -> Any:
        self._seen.append(call.batch)
        raise _SeenError


class _SeenError(BaseException):
    """Ends a run that has shown enough; not an exception that a pipeline would catch."""
