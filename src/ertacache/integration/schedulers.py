"""Everything that is read off a scheduler or set on it: sigmas, determinism, the form of a step.

What a step does is found by calling a copy of the scheduler on a small batch, one probe per row, so
most schedulers need no code of their own. The exceptions are ``_DETERMINISTIC`` (what to use
instead), ``read_sigmas`` (three kinds of noise schedules) and ``SigmaAdjustment``. A whole run is
read off in the same way, by a copy that steps over unit vectors (``read_schedule``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ertacache.core.gram import Schedule
from ertacache.formats.policy import PolicyError
from ertacache.integration.loops import LoopScheduler
from ertacache.integration.private_api import (
    Scheduler,
    begin_index,
    final_alpha,
    forget_run,
    fresh_copy,
    keeps_history,
    set_step_index,
)

__all__ = [
    "SchedulerError",
    "SigmaAdjustment",
    "StepForms",
    "check_deterministic",
    "first_order_update",
    "first_step",
    "install_sigmas",
    "prediction_of",
    "read_schedule",
    "read_sigmas",
    "variance_preserving_update",
]

# Rows: nothing, the latent, the output, and a mixture large enough for clipping to show.
_SAMPLES = (0.0, 1.0, 0.0, 20.0)
_OUTPUTS = (0.0, 0.0, 1.0, -30.0)
_TOLERANCE = 1e-3  # half a digit more than float32 steps lose at the ends of a noise schedule

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


# Of its nominal length. Divided differences over a reused step grow as one over its length: at 0.01
# UniPC is off by the size of the latent, at 0 it is NaN; above a half its own step is the better.
SHORT = 0.5


class SchedulerError(PolicyError):
    """A scheduler is not deterministic, not linear, or has no descending sigma schedule."""


@dataclass(frozen=True)
class _StepForm:
    """The form of what ``scheduler.step`` returns.

    Attributes:
        kind: ``tuple`` or the scheduler's output class.
        size: number of entries of the tuple.
        dtype: dtype of the latent in it.
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


class StepForms:
    """The forms of a scheduler's results, by the types of its arguments, probed when first met."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Begin without any."""
        self._scheduler = scheduler
        self._forms: dict[tuple[torch.dtype, torch.dtype, bool], _StepForm] = {}

    def fill(
        self, latent: Tensor, *, model_output: Tensor, sample: Tensor, return_dict: bool
    ) -> Any:
        """Return ``latent`` as the scheduler would return it for these arguments."""
        key = (model_output.dtype, sample.dtype, return_dict)
        if key not in self._forms:
            self._forms[key] = self._probe(model_output, sample, return_dict=return_dict)
        return self._forms[key].fill(latent)

    def _probe(self, model_output: Tensor, sample: Tensor, *, return_dict: bool) -> _StepForm:
        shape = (1,) * sample.ndim
        v, x = model_output.new_zeros(shape), sample.new_zeros(shape)
        result = _step(fresh_copy(self._scheduler), 0, x, v, return_dict=return_dict)
        kind = tuple if isinstance(result, tuple) else type(result)
        return _StepForm(kind, len(result) if kind is tuple else 1, result[0].dtype)


class SigmaAdjustment:
    """A sigma schedule of a stepper's own on a scheduler, installed for each run.

    On adjusted sigmas two kinds of scheduler need a first-order step of ours: one that keeps a
    history, on short steps, after which it begins a new history; and one that has no sigmas to
    replace (DDIM), on all steps.
    """

    def __init__(self, scheduler: Scheduler, sigmas: Tensor, *, nominal: Tensor) -> None:
        """Find the steps that are too short for a multistep scheduler.

        Args:
            scheduler: the scheduler.
            sigmas: the adjusted schedule, shape (T + 1,).
            nominal: the scheduler's own, of the same shape.
        """
        self._scheduler, self._sigmas = scheduler, sigmas
        short = sigmas.diff() > SHORT * nominal.diff()  # both are negative
        self._short: list[int] = short.nonzero().flatten().tolist()
        self._first_order: dict[int, list[float]] | None = None
        self._saved: dict[str, Tensor] = {}

    def install(self) -> None:
        """Replace the schedule that ``set_timesteps`` just made."""
        own = vars(self._scheduler)
        self._saved = {name: own[name] for name in ("sigmas", "timesteps") if name in own}
        install_sigmas(self._scheduler, self._sigmas)
        if self._first_order is None:
            self._first_order = self._own_steps()

    def restore(self) -> None:
        """Put the scheduler's own schedule back."""
        vars(self._scheduler).update(self._saved)
        self._saved = {}

    def first_order(self, step: int) -> list[float] | None:
        """Coefficients c, b of our own step ``c x + b v``; None where the scheduler's will do."""
        return None if self._first_order is None else self._first_order.get(step)

    def _own_steps(self) -> dict[int, list[float]]:
        if not isinstance(getattr(self._scheduler, "sigmas", None), Tensor):
            kind = self._scheduler.config["prediction_type"]
            rows = variance_preserving_update(self._sigmas, kind)
            return dict(enumerate(rows.tolist()))
        if not keeps_history(self._scheduler):
            return {}
        rows = first_order_update(self._scheduler)
        return {k: rows[k].tolist() for k in self._short}


def first_order_update(scheduler: Scheduler) -> Tensor:
    """First-order update ``x' = c x + b v`` of every step, probed on a copy without history.

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
        >>> first_order_update(scheduler)
        tensor([[ 1.0000, -0.2500],
                [ 1.0000, -0.7500]], dtype=torch.float64)
    """
    twin = fresh_copy(scheduler)
    rows = []
    for k in range(len(scheduler.timesteps)):
        forget_run(twin)
        rows.append(_probe(twin, k))
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
        return  # it needs sigmas of its own; the run is checked when it starts
    x = torch.zeros(1, 1, 1, 1)
    with torch.random.fork_rng(devices=[]):
        changed = _step(twin, 0, x, x)[0]
    if bool((changed != 0).any()):
        raise SchedulerError(f"{name} adds noise at every step: use {_instead(scheduler)}")


def _probe(twin: Any, step: int) -> Tensor:
    device = getattr(twin, "sigmas", twin.timesteps).device
    x, v = (torch.tensor(rows, device=device)[:, None, None, None] for rows in (_SAMPLES, _OUTPUTS))
    first = {"order": 1} if "order" in inspect.signature(twin.step).parameters else {}
    with torch.random.fork_rng(devices=[]):
        y = _step(twin, step, x, v, **first)[0].flatten().double().cpu()
    zero, c, b, mixed = y.tolist()
    if not bool(torch.isfinite(y).all()):
        raise SchedulerError(
            f"step {step} of {type(twin).__name__} divides by zero: a noise schedule that "
            "begins without any signal needs prediction_type='v_prediction'"
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


def _step(twin: Any, step: int, x: Tensor, v: Tensor, **options: Any) -> Any:
    if hasattr(twin, "set_begin_index"):
        twin.set_begin_index(step)
    return _take_step(twin, twin.timesteps[step], x, v, **options)


def _take_step(twin: Any, timestep: Any, x: Tensor, v: Tensor, **options: Any) -> Any:
    if hasattr(twin, "scale_model_input"):
        twin.scale_model_input(x, timestep)
    given = {"model_output": v, "timestep": timestep, "sample": x, "return_dict": False} | options
    for name in _required(type(twin).step):
        given.setdefault(name, None)
    return twin.step(**given)


@functools.cache
def _required(step: Callable[..., Any]) -> tuple[str, ...]:
    """Arguments of a scheduler's step without which it cannot be called."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(
        name
        for name, parameter in inspect.signature(step).parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in several and name != "self"
    )


def _instead(scheduler: Scheduler) -> str:
    name = type(scheduler).__name__
    if str(scheduler.config.get("algorithm_type", "")).startswith("sde-"):
        return f"{name} with algorithm_type='dpmsolver++'"
    if scheduler.config.get("stochastic_sampling"):
        return f"{name} with stochastic_sampling=False"
    return _DETERMINISTIC.get(name, "DDIMScheduler")


def read_schedule(scheduler: Scheduler, *, begin: int = 0) -> Schedule:
    """Read off what a full run of a scheduler is, after ``set_timesteps``.

    Args:
        scheduler: the scheduler; it is not changed, and its device is waited for once.
        begin: the step with which the run begins, more than 0 for image to image.

    Raises:
        SchedulerError: if its noise levels do not descend, or a step adds noise or is not linear.

    Example:
        >>> from diffusers import FlowMatchEulerDiscreteScheduler
        >>> scheduler = FlowMatchEulerDiscreteScheduler()
        >>> scheduler.set_timesteps(sigmas=[1.0, 0.75])
        >>> read_schedule(scheduler).latents
        tensor([[ 1.0000,  0.0000,  0.0000],
                [ 1.0000, -0.2500,  0.0000],
                [ 1.0000, -0.2500, -0.7500]], dtype=torch.float64)
    """
    if isinstance(scheduler, LoopScheduler):
        return scheduler.read()
    twin = fresh_copy(scheduler)
    for name, value in vars(twin).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.cpu())
    return Schedule(
        sigmas=read_sigmas(twin)[begin:],
        nominal=first_order_update(twin)[begin:],
        latents=_unroll(fresh_copy(twin), begin),
        scale=_latent_scales(twin)[begin:],
        begun=begin == 0,
    )


def _unroll(twin: Any, begin: int) -> Tensor:
    """Latents of a full run as combinations of its start and its outputs, (T + 1, T + 1)."""
    T = len(twin.timesteps) - begin  # noqa: N806
    units = torch.eye(T + 1, dtype=torch.float64)[:, None, :, None, None]
    rows = [units[0]]
    if hasattr(twin, "set_begin_index"):
        twin.set_begin_index(begin)
    with torch.random.fork_rng(devices=[]):
        for k in range(T):
            latent = _take_step(twin, twin.timesteps[begin + k], rows[-1], units[1 + k])[0]
            rows.append(latent.double())
    return torch.cat(rows)[:, :, 0, 0]


def _latent_scales(twin: Any) -> Tensor:
    """What ``scale_model_input`` divides the latent by before every step; 1 after the last."""
    T = len(twin.timesteps)  # noqa: N806
    scales = torch.ones(T + 1, dtype=torch.float64)
    if not hasattr(twin, "scale_model_input"):
        return scales
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for k in range(T):
        if hasattr(twin, "set_begin_index"):
            twin.set_begin_index(k)
        set_step_index(twin, None)
        scaled = twin.scale_model_input(one, twin.timesteps[k]).item()
        if k == 0 and scaled == 1:  # most do not scale at all
            break
        scales[k] = 1 / scaled
    return scales


def first_step(scheduler: Scheduler, timestep: Any) -> int:
    """The step with which a run begins whose first timestep is ``timestep``.

    A pipeline may say so beforehand; a scheduler that was not told looks the timestep up as well.

    Example:
        >>> from diffusers import FlowMatchEulerDiscreteScheduler
        >>> scheduler = FlowMatchEulerDiscreteScheduler()
        >>> scheduler.set_timesteps(4)
        >>> first_step(scheduler, scheduler.timesteps[1])
        1
    """
    begin = begin_index(scheduler)
    if begin is not None:
        return begin
    timesteps = scheduler.timesteps
    first = torch.as_tensor(timestep).flatten()[0].to(timesteps)
    if bool(first == timesteps[0]):
        return 0
    places: list[int] = (timesteps == first).nonzero().flatten().tolist()
    if len(places) != 1:
        raise PolicyError(
            f"the run begins with timestep {float(first):g}, which is {len(places)} times in "
            "the scheduler's timesteps: no policy can follow it; detach it for this call"
        )
    return places[0]


def prediction_of(scheduler: Scheduler) -> str:
    """What the network's output means to a scheduler, such as ``"flow"`` or ``"epsilon"``."""
    return "flow" if _is_flow(scheduler) else str(scheduler.config.get("prediction_type", "flow"))


def _is_flow(scheduler: Any) -> bool:
    """Whether its sigmas are shares of noise: of a latent ``(1 - sigma) data + sigma noise``."""
    if "use_flow_sigmas" in scheduler.config:
        return bool(scheduler.config["use_flow_sigmas"])
    if hasattr(scheduler, "alphas_cumprod"):
        return False
    own = getattr(scheduler, "sigmas", None)
    return isinstance(own, Tensor) and float(own.max()) <= 1 + 1e-6


def read_sigmas(scheduler: Scheduler) -> Tensor:
    """Return the noise levels of a scheduler after ``set_timesteps``, strictly descending.

    One measure for all schedulers, the share of noise ``s / (a + s)`` of a latent of ``a`` data and
    ``s`` noise: 1 for pure noise, 0 for none. The sigmas of a flow are that share; ascending ones
    (Mochi) are ``1 - sigmas``. Sigmas of schedulers that leave the data unscaled (Euler, DPM) are
    ``s / a``. A scheduler that has only ``alphas_cumprod`` (DDIM) has ``a**2 = alphas_cumprod`` and
    ``a**2 + s**2 = 1``. A run whose last step has no length ends with 0 all the same.

    Returns:
        The sigmas, shape (T + 1,), float64, on the CPU.

    Raises:
        SchedulerError: if they do not descend at every step.
    """
    own = getattr(scheduler, "sigmas", None)
    if isinstance(own, Tensor):
        sigmas = own.detach().to("cpu", torch.float64)
        if not _is_flow(scheduler):
            sigmas = sigmas / (1 + sigmas)
        sigmas = 1 - sigmas if bool(sigmas[0] < sigmas[-1]) else sigmas
        if bool(sigmas[-1] == sigmas[-2]):  # a last step of no length, as that of Cosmos
            sigmas = torch.cat([sigmas[:-1], sigmas.new_zeros(1)])
    elif hasattr(scheduler, "alphas_cumprod"):
        alphas = _alphas_cumprod(scheduler)[scheduler.timesteps.to("cpu", torch.int64)]
        sigmas = _noise_share(torch.cat([alphas, alphas.new_tensor([final_alpha(scheduler)])]))
    else:
        raise SchedulerError(
            f"{type(scheduler).__name__} has no noise schedule, which every policy follows: "
            "use a scheduler with sigmas or alphas_cumprod, such as DDIMScheduler"
        )
    if len(sigmas) != len(scheduler.timesteps) + 1 or bool((sigmas.diff() >= 0).any()):
        raise SchedulerError(
            f"the noise levels of {type(scheduler).__name__} do not descend at every step: "
            "choose another timestep_spacing or final_sigmas_type, or DDIMScheduler"
        )
    return sigmas


def install_sigmas(scheduler: Any, sigmas: Tensor) -> None:
    """Replace the sigmas that ``set_timesteps`` just made, and the timesteps with them.

    Timesteps follow by interpolation, so that entries that stay keep their timestep exactly.
    """
    nominal, own = read_sigmas(scheduler), getattr(scheduler, "sigmas", None)
    if not isinstance(own, Tensor):
        levels = _noise_share(_alphas_cumprod(scheduler)).flip(0)
        times = torch.arange(len(levels) - 1, -1, -1, dtype=torch.float64)
        scheduler.timesteps = (
            _interpolate(sigmas[:-1], levels, times).round().to(scheduler.timesteps)
        )
        return
    ours = sigmas if _is_flow(scheduler) else sigmas / (1 - sigmas)
    ours = (1 - ours if bool(own[0] < own[-1]) else ours).to(own.device, own.dtype)
    scale = scheduler.config.get("num_train_timesteps", 1)
    if torch.equal(scheduler.timesteps, own[:-1] * scale):  # flows: the same rule, to the bit
        scheduler.timesteps = ours[:-1] * scale
    else:
        times = scheduler.timesteps.to("cpu", torch.float64)
        moved = _interpolate(sigmas[:-1], nominal[:-1], times)
        whole = not scheduler.timesteps.is_floating_point()
        scheduler.timesteps = (moved.round() if whole else moved).to(scheduler.timesteps)
    scheduler.sigmas = ours


def variance_preserving_update(sigmas: Tensor, prediction_type: str) -> Tensor:
    """DDIM between any two sigmas ``s / (a + s)``: ``x' = c x + b v``, shape (T, 2).

    Example:
        >>> variance_preserving_update(torch.tensor([0.5, 0.0]), "sample")
        tensor([[0., 1.]])
    """
    norm = torch.hypot(sigmas, 1 - sigmas)
    a, s = (1 - sigmas) / norm, sigmas / norm
    a, s, a_next, s_next = a[:-1], s[:-1], a[1:], s[1:]
    if prediction_type == "v_prediction":
        return torch.stack([a * a_next + s * s_next, a * s_next - s * a_next], dim=1)
    if prediction_type == "epsilon":
        return torch.stack([a_next / a, s_next - s * a_next / a], dim=1)
    if prediction_type == "sample":
        return torch.stack([s_next / s, a_next - a * s_next / s], dim=1)
    raise SchedulerError(f"prediction_type {prediction_type!r} has no known update")


def _alphas_cumprod(scheduler: Any) -> Tensor:
    alphas: Tensor = scheduler.alphas_cumprod
    return alphas.detach().to("cpu", torch.float64)


def _noise_share(alphas_cumprod: Tensor) -> Tensor:
    a, s = alphas_cumprod.sqrt(), (1 - alphas_cumprod).clamp_min(0).sqrt()
    return s / (a + s)


def _interpolate(at: Tensor, levels: Tensor, times: Tensor) -> Tensor:
    """Piecewise linear in a strictly descending ``levels``; beyond its ends, the last piece."""
    if len(levels) == 1:
        return times.expand(len(at))
    right = torch.searchsorted(-levels, -at).clamp(1, len(levels) - 1)
    left = right - 1
    share = (at - levels[left]) / (levels[right] - levels[left])
    return times[left] + share * (times[right] - times[left])
