"""Record the untouched run of a pipeline: all latents and all combined outputs.

Looks on at the scheduler's two touch points and changes nothing. Knows neither prompts nor
profiles: the pipeline's arguments are passed through.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ertacache.core.solver import Trajectory
from ertacache.integration.compat import Pipeline, check_free
from ertacache.integration.errors import SchedulerError
from ertacache.integration.fingerprints import find_denoisers
from ertacache.integration.probe import check_deterministic
from ertacache.integration.scheduler import SchedulerPatch, StepCall, check_plain
from ertacache.integration.tables import read_sigmas

__all__ = ["Recording", "record", "record_run"]


@dataclass(frozen=True, eq=False)
class Recording:
    """An untouched run.

    Attributes:
        run: the latents x_0 ... x_T and outputs v_0 ... v_{T-1} as the scheduler saw them, each of
            shape (P, ...).
        sigmas: the table, shape (T + 1,), float64.
        first_steps: the steps with which the pipeline's networks begin; 0 alone if there is one.
    """

    run: Trajectory
    sigmas: Tensor
    first_steps: tuple[int, ...]


def record_run(pipe: Pipeline, **call_kwargs: Any) -> tuple[Trajectory, Tensor]:
    """Run a pipeline once, without decoding, and return its trajectory and its sigma table.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        **call_kwargs: arguments of the pipeline; ``output_type`` is ``"latent"`` unless given.

    Returns:
        ``run`` and ``sigmas`` of a ``Recording``.

    Raises:
        SchedulerError: if the scheduler adds noise, or the run did not take every step.
        RuntimeError: if a policy is attached to the scheduler or a network.
    """
    found = record(pipe, **call_kwargs)
    return found.run, found.sigmas


def record(pipe: Pipeline, **call_kwargs: Any) -> Recording:
    """Run a pipeline once as ``record_run`` does, and note when its networks begin as well."""
    networks = find_denoisers(pipe)
    for module in networks.values():
        check_free(module)
    recorder = _Recorder(pipe.scheduler)
    with ExitStack() as undo:
        patch = SchedulerPatch(pipe.scheduler, on_start=recorder.start, on_step=recorder.step)
        undo.callback(patch.remove)
        for name, module in networks.items() if len(networks) > 1 else ():
            hook = module.register_forward_pre_hook(lambda *_, name=name: recorder.enter(name))
            undo.callback(hook.remove)
        pipe(**({"output_type": "latent"} | call_kwargs))
    return recorder.result()


class _Recorder:
    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._latents: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._sigmas: Tensor | None = None
        self._begins: dict[str, int] = {}

    def start(self) -> None:
        check_deterministic(self._scheduler, num_steps=len(self._scheduler.timesteps))
        self._sigmas = read_sigmas(self._scheduler)
        self._latents, self._outputs, self._begins = [], [], {}

    def enter(self, name: str) -> None:
        self._begins.setdefault(name, len(self._outputs))

    def step(self, call: StepCall) -> Any:
        check_plain(call, self._scheduler)
        # Copies: what a pipeline does to its latents later must not reach the record.
        self._latents[len(self._outputs) :] = [call.sample.detach().clone()]
        self._outputs.append(call.model_output.detach().clone())
        result = call.stock()
        self._latents.append(result[0].detach().clone())
        return result

    def result(self) -> Recording:
        if not self._outputs:
            raise SchedulerError(
                "the pipeline never called the step of its scheduler, but that of copies, or of "
                "none: no policy can follow such a run"
            )
        if self._sigmas is None or len(self._outputs) != len(self._sigmas) - 1:
            raise SchedulerError(
                f"the run took {len(self._outputs)} steps of its table: "
                "only whole runs from step 0 can be recorded"
            )
        run = Trajectory(tuple(self._latents), tuple(self._outputs))
        return Recording(run, self._sigmas, tuple(sorted({0, *self._begins.values()})))
