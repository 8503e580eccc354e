"""What a scheduler's step does, found by asking a copy of it.

One row of a small batch per question: is it deterministic, is it linear, what does it return. So no
scheduler needs code of its own. Knows no policy and never touches the scheduler it is given.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ertacache.integration.compat import Scheduler, fresh_copy
from ertacache.integration.errors import SchedulerError

__all__ = ["StepResult", "check_deterministic", "nominal", "probe_result"]

# Rows: nothing, the latent, the output, and a mixture large enough for clipping to show.
_SAMPLES = (0.0, 1.0, 0.0, 20.0)
_OUTPUTS = (0.0, 0.0, 1.0, -30.0)
_TOLERANCE = 1e-3  # half a digit more than float32 steps lose at the ends of a noise table

_DETERMINISTIC = {
    "CogVideoXDPMScheduler": "CogVideoXDDIMScheduler",
    "DPMSolverSDEScheduler": "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler": "EulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler": "FlowMatchEulerDiscreteScheduler",
    "FlowMatchLCMScheduler": "FlowMatchEulerDiscreteScheduler",
    "HeunDiscreteScheduler": "EulerDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler": "EulerDiscreteScheduler",
    "KDPM2DiscreteScheduler": "EulerDiscreteScheduler",
    "LTXEulerAncestralRFScheduler": "FlowMatchEulerDiscreteScheduler",
}


@dataclass(frozen=True)
class StepResult:
    """The form of what ``scheduler.step`` returns.

    Attributes:
        kind: ``tuple`` or the scheduler's output class.
        size: number of entries of the tuple.
        dtype: number type of the latent in it.
    """

    kind: type[Any]
    size: int
    dtype: torch.dtype

    def fill(self, sample: Tensor) -> Any:
        """Return ``sample`` in this form; other entries, such as the predicted x_0, are None."""
        sample = sample.to(self.dtype)
        if self.kind is tuple:
            return (sample, *[None] * (self.size - 1))
        return self.kind(prev_sample=sample)


def probe_result(
    scheduler: Scheduler, model_output: Tensor, *, sample: Tensor, return_dict: bool
) -> StepResult:
    """Ask a copy what form its step returns for tensors of these types."""
    shape = (1,) * sample.ndim
    v, x = model_output.new_zeros(shape), sample.new_zeros(shape)
    result = _step(fresh_copy(scheduler), 0, x, v, return_dict=return_dict)
    kind = tuple if isinstance(result, tuple) else type(result)
    return StepResult(kind, len(result) if kind is tuple else 1, result[0].dtype)


def nominal(scheduler: Scheduler) -> Tensor:
    """First-order update ``x' = c x + b v`` of every step, asked of a copy without history.

    For a multistep scheduler this is the step it takes when it has no history.

    Args:
        scheduler: after ``set_timesteps``.

    Returns:
        c and b of every step, shape (T, 2), float64.

    Raises:
        SchedulerError: if a step adds noise or is not linear.

    Example:
        >>> from diffusers import FlowMatchEulerDiscreteScheduler
        >>> scheduler = FlowMatchEulerDiscreteScheduler()
        >>> scheduler.set_timesteps(sigmas=[1.0, 0.75])
        >>> nominal(scheduler)
        tensor([[ 1.0000, -0.2500],
                [ 1.0000, -0.7500]], dtype=torch.float64)
    """
    pristine = fresh_copy(scheduler)
    rows = [_probe(fresh_copy(pristine), k) for k in range(len(scheduler.timesteps))]
    return torch.stack(rows)


def check_deterministic(scheduler: Scheduler, *, num_steps: int) -> None:
    """Raise a ``SchedulerError`` naming a scheduler to use instead, unless this one will do."""
    name = type(scheduler).__name__
    order = getattr(scheduler, "order", 1)
    if order != 1:
        raise SchedulerError(
            f"{name} calls the network {order} times per step: use {_instead(scheduler)}"
        )
    twin = fresh_copy(scheduler)
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    try:
        twin.set_timesteps(num_steps, **shift)
    except (TypeError, ValueError):
        return  # it needs a table of its own; that run's table is looked at when it starts
    x = torch.zeros(1, 1, 1, 1)
    with torch.random.fork_rng(devices=[]):
        changed = _step(twin, 0, x, x)[0]
    if bool((changed != 0).any()):
        raise SchedulerError(f"{name} adds noise at every step: use {_instead(scheduler)}")


def _probe(twin: Any, step: int) -> Tensor:
    device = getattr(twin, "sigmas", twin.timesteps).device
    x, v = (torch.tensor(rows, device=device)[:, None, None, None] for rows in (_SAMPLES, _OUTPUTS))
    with torch.random.fork_rng(devices=[]):
        y = _step(twin, step, x, v)[0].flatten().double().cpu()
    zero, c, b, mixed = y.tolist()
    if not bool(torch.isfinite(y).all()):
        raise SchedulerError(
            f"step {step} of {type(twin).__name__} divides by zero: a table that begins without "
            "any signal needs prediction_type='v_prediction'"
        )
    scale = max(1.0, abs(20 * c) + abs(30 * b))
    if zero != 0:
        raise SchedulerError(f"{type(twin).__name__} adds noise: use {_instead(twin)}")
    if not abs(mixed - (20 * c - 30 * b)) <= _TOLERANCE * scale:
        raise SchedulerError(
            f"step {step} of {type(twin).__name__} is not linear: "
            "turn clip_sample and thresholding off in its configuration"
        )
    return torch.tensor([c, b], dtype=torch.float64)


def _step(twin: Any, step: int, x: Tensor, v: Tensor, *, return_dict: bool = False) -> Any:
    timestep = twin.timesteps[step]
    if hasattr(twin, "set_begin_index"):
        twin.set_begin_index(step)
    if hasattr(twin, "scale_model_input"):
        twin.scale_model_input(x, timestep)
    given = {"model_output": v, "timestep": timestep, "sample": x, "return_dict": return_dict}
    parameters = inspect.signature(twin.step).parameters
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if required:
            given.setdefault(name, None)
    return twin.step(**given)


def _instead(scheduler: Scheduler) -> str:
    name = type(scheduler).__name__
    if str(scheduler.config.get("algorithm_type", "")).startswith("sde-"):
        return f"{name} with algorithm_type='dpmsolver++'"
    if scheduler.config.get("stochastic_sampling"):
        return f"{name} with stochastic_sampling=False"
    return _DETERMINISTIC.get(name, "DDIMScheduler")
