"""How a plan stands in a policy file: a JSON record and a few tensors.

Knows neither the rest of the policy nor how a plan is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from ertacache.core.plan import PaperPlan, Reuse, TrajectoryPlan
from ertacache.formats.checks import MAX_DIMENSIONS, FormatError, check_count
from ertacache.formats.strictjson import take_list, take_record

__all__ = ["build_plan", "check_plan", "plan_parts", "plan_shapes"]

MAX_HISTORY = 16
_TRAJECTORY: dict[str, tuple[type, ...]] = {
    "compute_steps": (list,),
    "history": (int,),
    "method": (str,),
}
_PAPER: dict[str, tuple[type, ...]] = {
    "compute_steps": (list,),
    "gain_shape": (list, type(None)),
    "method": (str,),
    "reuse": (str,),
}


def check_plan(plan: object, num_steps: int) -> None:
    """Raise unless ``plan`` is one that a policy of ``num_steps`` steps can hold."""
    if not isinstance(plan, TrajectoryPlan | PaperPlan):
        raise FormatError(f"plan must be TrajectoryPlan or PaperPlan, not {type(plan).__name__}")
    if plan.num_steps != num_steps:
        raise FormatError(f"the plan has {plan.num_steps} steps, but the run {num_steps}")
    if isinstance(plan, TrajectoryPlan):
        check_count("history", plan.history, low=1, high=MAX_HISTORY)
    elif plan.gain is not None:
        _check_gain_shape(list(plan.gain.shape[1:]))


def _check_gain_shape(shape: list[Any]) -> tuple[int, ...]:
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"gain has more than {MAX_DIMENSIONS} dimensions for one sample")
    return tuple(check_count("gain_shape", size, low=1) for size in shape)


def plan_shapes(value: dict[str, Any], num_steps: int) -> dict[str, tuple[int, ...]]:
    """Check the record of a plan and return the shapes of its tensors."""
    method = value.get("method")
    if method == "trajectory":
        record = take_record(value, _TRAJECTORY, "plan")
        history = check_count("plan.history", record["history"], low=1, high=MAX_HISTORY)
        return {"plan.latent": (num_steps,), "plan.outputs": (num_steps, history)}
    if method != "paper":
        raise FormatError("plan.method must be 'trajectory' or 'paper'")
    record = take_record(value, _PAPER, "plan")
    shapes: dict[str, tuple[int, ...]] = {"plan.sigmas": (num_steps + 1,)}
    if record["gain_shape"] is not None:
        gain = (num_steps, *_check_gain_shape(record["gain_shape"]))
        shapes |= {"plan.gain": gain, "plan.bias": gain}
    return shapes


def build_plan(record: dict[str, Any], tensors: Mapping[str, Tensor]) -> TrajectoryPlan | PaperPlan:
    """Return the plan of a record that ``plan_shapes`` has checked."""
    steps = tuple(take_list(record["compute_steps"], int, "plan.compute_steps"))
    if record["method"] == "trajectory":
        return TrajectoryPlan(steps, tensors["plan.latent"], tensors["plan.outputs"])
    gain, bias = tensors.get("plan.gain"), tensors.get("plan.bias")
    reuse = cast(Reuse, record["reuse"])
    return PaperPlan(steps, reuse, tensors["plan.sigmas"], gain, bias)


def plan_parts(plan: TrajectoryPlan | PaperPlan) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the record of a plan, without steps and method, and its tensors."""
    if isinstance(plan, TrajectoryPlan):
        tensors = {"plan.latent": plan.latent, "plan.outputs": plan.outputs}
        return {"history": plan.history}, tensors
    tensors = {"plan.sigmas": plan.sigmas}
    if plan.gain is None or plan.bias is None:
        return {"gain_shape": None, "reuse": plan.reuse}, tensors
    shape = list(plan.gain.shape[1:])
    tensors |= {"plan.gain": plan.gain, "plan.bias": plan.bias}
    return {"gain_shape": shape, "reuse": plan.reuse}, tensors
