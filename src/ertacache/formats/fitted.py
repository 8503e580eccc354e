"""The plans in a policy file: each with the run it is for, and what was predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, cast

from torch import Tensor

from ertacache.core.gram import Schedule, close
from ertacache.core.plans import (
    PaperPlan,
    Reuse,
    TrajectoryPlan,
    check_compute_steps,
    step_strip,
)
from ertacache.formats.groups import check_groups, groups_to_json, take_groups
from ertacache.formats.guided import GuidedCoefficients, guided_shape, take_guided
from ertacache.formats.schema import (
    MAX_DIMENSIONS,
    MAX_STEPS,
    FormatError,
    PolicyError,
    check_count,
    check_number,
    check_sigmas,
    check_string,
    check_tensor,
    raising,
    take_list,
    take_record,
)

__all__ = ["OWN_ROW", "FittedPlan", "ValidationRow"]

MAX_HISTORY = 16
OWN_ROW = "policy"
"""Name of a plan's own row among its measurements."""

_NUMBER = (float, int)
_OPTIONAL = (*_NUMBER, type(None))
_ROW: dict[str, tuple[type, ...]] = {
    "computed_steps": (int,),
    "heldout": (bool,),
    "method": (str,),
    "prompts": (int,),
    "psnr": _OPTIONAL,
    "speedup": _NUMBER,
}
_COMMON: dict[str, tuple[type, ...]] = {
    "compute_steps": (list,),
    "measured_error": _OPTIONAL,
    "method": (str,),
    "num_steps": (int,),
    "predicted_error": _OPTIONAL,
    "target": (bool,),
    "target_psnr": _OPTIONAL,
    "validation": (list,),
}
_TRAJECTORY = _COMMON | {
    "branch": (bool,),
    "groups": (dict,),
    "guided": (dict, type(None)),
    "history": (int,),
}
_PAPER = _COMMON | {"gain_shape": (list, type(None)), "reuse": (str,)}


@dataclass(frozen=True)
class ValidationRow:
    """One sampling variant, measured on prompts that the plan was not fitted on, if there are any.

    Attributes:
        method: what was run, such as ``"policy"``, ``"plain reuse"`` or ``"fewer steps"``.
        computed_steps: steps on which the network was evaluated.
        psnr: decibels to the full run; infinite where the results are identical.
        speedup: measured time of the full run over that of this one.
        prompts: number of prompts.
        heldout: whether the plan was fitted on none of them; otherwise only their seeds are others.

    Example:
        >>> row = ValidationRow("policy", 10, psnr=46.5, speedup=2.9, prompts=24)
        >>> row.measured_on
        '24 held-out prompts'
    """

    method: str
    computed_steps: int
    psnr: float
    speedup: float
    prompts: int
    heldout: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        with raising(PolicyError):
            check_string("method", self.method)
            check_count("computed_steps", self.computed_steps, low=1)
            if self.psnr != math.inf:
                object.__setattr__(self, "psnr", check_number("psnr", self.psnr))
            object.__setattr__(self, "speedup", check_number("speedup", self.speedup, low=0.0))
            check_count("prompts", self.prompts, low=1)
            if not isinstance(self.heldout, bool):
                raise FormatError(f"heldout must be a boolean, got {type(self.heldout).__name__}")

    @property
    def measured_on(self) -> str:
        """The prompts in words."""
        plural = "" if self.prompts == 1 else "s"
        if self.heldout:
            return f"{self.prompts} held-out prompt{plural}"
        return f"{self.prompts} calibration prompt{plural} with other seeds, not held out"

    def _to_json(self) -> dict[str, object]:
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return record | {"psnr": None if self.psnr == math.inf else self.psnr}

    @classmethod
    def _from_json(cls, value: object, where: str) -> ValidationRow:
        record = take_record(value, _ROW, where)
        psnr = math.inf if record["psnr"] is None else record["psnr"]
        return cls(**(record | {"psnr": psnr}))


@dataclass(frozen=True, eq=False, repr=False)
class FittedPlan:
    """A plan, the run that it is for, and how close it comes.

    Attributes:
        plan: what a run does on every step.
        sigmas: the nominal sigma schedule of that run, shape (T + 1,), float64, descending.
        target: the final latent of its full run in its start and outputs (``Schedule.target``),
            shape (T + 1,), float64: the scheduler, whatever its name. None if any will do, as for
            the paper's method, which takes the scheduler's own steps.
        predicted_error: expected distance of the final latent to that of the full run, root mean
            square; None for the paper's method, which predicts none.
        measured_error: the same, measured on prompts that it was not fitted on; None before that.
        validation: measurements, on held-out prompts if there were any.
        target_psnr: the PSNR that it was calibrated for, in dB; None if for something else.
        guided: coefficients by the value of a guidance argument, for the same compute schedule;
            None if those of the plan serve all. ``at`` takes them.

    Example:
        >>> import torch
        >>> sigmas = torch.linspace(1, 0, 5, dtype=torch.float64)
        >>> reuse = sigmas.diff()[:, None]  # plain reuse: Euler with the newest output
        >>> plan = TrajectoryPlan((0, 2), torch.cat([torch.ones(4, 1), reuse], dim=1)[:, None])
        >>> row = ValidationRow("policy", 2, psnr=46.5, speedup=1.9, prompts=24)
        >>> fitted = FittedPlan(plan, sigmas, validation=(row,))
        >>> fitted.method, fitted.reuse_steps, fitted.speedup
        ('trajectory', (1, 3), 2.0)
        >>> print(fitted)
        trajectory: 2 of 4 steps computed, 2.00x fewer
        █·█·
        measured on 24 held-out prompts: 46.5 dB PSNR to the full run, 1.90x faster
    """

    plan: TrajectoryPlan | PaperPlan
    sigmas: Tensor
    _: KW_ONLY
    target: Tensor | None = None
    predicted_error: float | None = None
    measured_error: float | None = None
    validation: tuple[ValidationRow, ...] = ()
    target_psnr: float | None = None
    guided: GuidedCoefficients | None = None

    def __post_init__(self) -> None:
        """Check that the parts are valid and belong together."""
        with raising(PolicyError):
            _check_plan(self.plan)
            check_count("num_steps", self.num_steps, low=1, high=MAX_STEPS)
            check_sigmas(self.sigmas, num_steps=self.num_steps)
            if self.target is not None:
                check_tensor("target", self.target, shape=(self.num_steps + 1,))
            for name in ("predicted_error", "measured_error", "target_psnr"):
                value = getattr(self, name)
                if value is not None:
                    low = -math.inf if name == "target_psnr" else 0.0
                    object.__setattr__(self, name, check_number(name, value, low=low))
            _check_guided(self.guided, self.plan)
            object.__setattr__(self, "validation", tuple(self.validation))
            for row in self.validation:
                if not isinstance(row, ValidationRow):
                    kind = type(row).__name__
                    raise FormatError(f"validation must hold ValidationRow, not {kind}")
                check_count("computed_steps", row.computed_steps, low=1, high=self.num_steps)

    def __repr__(self) -> str:
        """What it is in one line, without its tensors."""
        return f"<{self._headline()}>"

    def __str__(self) -> str:
        """Schedule strip, measured PSNR and speed-up."""
        lines = [self._headline(), step_strip(self.compute_steps, self.num_steps)]
        if self.guided is not None:
            lines.append(f"fitted for {self.guided}, interpolated between")
        row = self.measured
        if row is not None:
            psnr = "identical" if row.psnr == math.inf else f"{row.psnr:.1f} dB PSNR"
            lines.append(
                f"measured on {row.measured_on}: {psnr} to the full run, {row.speedup:.2f}x faster"
            )
        elif self.predicted_error is not None:
            lines.append(f"not measured; predicted error of the latent {self.predicted_error:.3g}")
        return "\n".join(lines)

    def _headline(self) -> str:
        steps = f"{len(self.compute_steps)} of {self.num_steps} steps computed"
        return f"{self.method}: {steps}, {self.speedup:.2f}x fewer"

    @property
    def method(self) -> Literal["trajectory", "paper"]:
        """Which of the two methods the plan is of."""
        return "trajectory" if isinstance(self.plan, TrajectoryPlan) else "paper"

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return self.plan.num_steps

    @property
    def compute_steps(self) -> tuple[int, ...]:
        """Steps on which the network is evaluated, ascending."""
        return self.plan.compute_steps

    @property
    def reuse_steps(self) -> tuple[int, ...]:
        """Steps on which it is not, ascending."""
        computed = set(self.compute_steps)
        return tuple(k for k in range(self.num_steps) if k not in computed)

    @property
    def speedup(self) -> float:
        """Steps over computed steps: the speed-up if only the network took time."""
        return self.num_steps / len(self.compute_steps)

    @property
    def measured(self) -> ValidationRow | None:
        """The row of the plan itself among the measurements; None if there is none."""
        return next((row for row in self.validation if row.method == OWN_ROW), None)

    def at(self, guidance: Mapping[str, tuple[float, ...]]) -> FittedPlan:
        """This plan with the coefficients for a run with these guidance arguments."""
        guided, plan = self.guided, self.plan
        value = None if guided is None else guided.value_in(guidance)
        if guided is None or value is None or not isinstance(plan, TrajectoryPlan):
            return self
        return replace(self, plan=replace(plan, coefficients=guided.at(value)), guided=None)

    def fits(self, schedule: Schedule) -> bool:
        """Whether the plan is for runs on this schedule."""
        return close(self.sigmas, schedule.sigmas) and (
            self.target is None or close(self.target, schedule.target)
        )

    def replaces(self, other: FittedPlan) -> bool:
        """Whether both are of one method, for the same runs, with as many computed steps."""
        return (
            self.method == other.method
            and len(self.compute_steps) == len(other.compute_steps)
            and close(self.sigmas, other.sigmas)
            and _same_target(self.target, other.target)
        )

    def to_json(self) -> dict[str, object]:
        """The record of a file."""
        record: dict[str, object] = {
            "compute_steps": list(self.compute_steps),
            "measured_error": self.measured_error,
            "method": self.method,
            "num_steps": self.num_steps,
            "predicted_error": self.predicted_error,
            "target": self.target is not None,
            "target_psnr": self.target_psnr,
            "validation": [row._to_json() for row in self.validation],
        }
        plan = self.plan
        if isinstance(plan, TrajectoryPlan):
            return record | {
                "branch": plan.branch,
                "groups": groups_to_json(plan.groups),
                "guided": None if self.guided is None else self.guided.to_json(),
                "history": plan.history,
            }
        shape = None if plan.gain is None else list(plan.gain.shape[1:])
        return record | {"gain_shape": shape, "reuse": plan.reuse}

    def tensors(self, place: int) -> dict[str, Tensor]:
        """The tensors of a file that has this plan at ``place``."""
        plan, parts = self.plan, {"sigmas": self.sigmas}
        if self.target is not None:
            parts["target"] = self.target
        if isinstance(plan, TrajectoryPlan):
            parts["coefficients"] = plan.coefficients
            if self.guided is not None:
                parts["guided"] = self.guided.coefficients
        else:
            parts["adjusted"] = plan.sigmas
            if plan.gain is not None and plan.bias is not None:
                parts |= {"gain": plan.gain, "bias": plan.bias}
        return {f"plan.{place}.{name}": value for name, value in parts.items()}

    @staticmethod
    def shapes(value: object, place: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a plan with this record, which is checked."""
        where = f"plans[{place}]"
        method = value.get("method") if isinstance(value, dict) else None
        if method not in ("trajectory", "paper"):
            raise FormatError(f"{where}.method must be 'trajectory' or 'paper'")
        record = take_record(value, _TRAJECTORY if method == "trajectory" else _PAPER, where)
        T = check_count(f"{where}.num_steps", record["num_steps"], low=1, high=MAX_STEPS)  # noqa: N806
        shapes: dict[str, tuple[int, ...]] = {"sigmas": (T + 1,)}
        if record["target"]:
            shapes["target"] = (T + 1,)
        if method == "trajectory":
            H = check_count(f"{where}.history", record["history"], low=1, high=MAX_HISTORY)  # noqa: N806
            count = take_groups(record["groups"], f"{where}.groups").count
            one = (T, count, 1 + H * (2 if record["branch"] else 1))
            several = guided_shape(record["guided"], f"{where}.guided", one)
            shapes |= {"coefficients": one} | ({} if several is None else {"guided": several})
        else:
            shapes["adjusted"] = (T + 1,)
            if record["gain_shape"] is not None:
                gain = (T, *_check_gain_shape(record["gain_shape"]))
                shapes |= {"gain": gain, "bias": gain}
        return {f"plan.{place}.{name}": shape for name, shape in shapes.items()}

    @classmethod
    def from_parts(
        cls, record: dict[str, Any], tensors: Mapping[str, Tensor], place: int
    ) -> FittedPlan:
        """The plan of a record whose ``shapes`` were checked, and its tensors."""
        where, prefix = f"plans[{place}]", f"plan.{place}."
        parts = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        steps = tuple(take_list(record["compute_steps"], int, f"{where}.compute_steps"))
        plan: TrajectoryPlan | PaperPlan
        guided: GuidedCoefficients | None = None
        if record["method"] == "trajectory":
            groups = take_groups(record["groups"], f"{where}.groups")
            if record["guided"] is not None:
                guidance = take_guided(record["guided"], f"{where}.guided")
                guided = GuidedCoefficients(*guidance, parts["guided"])
            plan = TrajectoryPlan(steps, parts["coefficients"], groups, branch=record["branch"])
        else:
            reuse = cast(Reuse, record["reuse"])
            plan = PaperPlan(steps, reuse, parts["adjusted"], parts.get("gain"), parts.get("bias"))
        rows = enumerate(record["validation"])
        return cls(
            plan,
            parts["sigmas"],
            target=parts.get("target"),
            predicted_error=record["predicted_error"],
            measured_error=record["measured_error"],
            validation=tuple(
                ValidationRow._from_json(row, f"{where}.validation[{k}]") for k, row in rows
            ),
            target_psnr=record["target_psnr"],
            guided=guided,
        )


def _same_target(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return close(ours, theirs)


def _check_plan(plan: object) -> None:
    """Raise unless ``plan`` is one that a file can hold."""
    if not isinstance(plan, TrajectoryPlan | PaperPlan):
        raise FormatError(f"plan must be TrajectoryPlan or PaperPlan, not {type(plan).__name__}")
    check_compute_steps(plan.compute_steps, plan.num_steps)
    if isinstance(plan, TrajectoryPlan):
        check_count("history", plan.history, low=1, high=MAX_HISTORY)
        check_groups(plan.groups)
        if not isinstance(plan.branch, bool):
            raise FormatError(f"branch must be a boolean, got {type(plan.branch).__name__}")
    elif plan.gain is not None:
        _check_gain_shape(list(plan.gain.shape[1:]))


def _check_guided(guided: object, plan: TrajectoryPlan | PaperPlan) -> None:
    """Raise unless coefficients by guidance are those of the plan."""
    if guided is None:
        return
    if not isinstance(guided, GuidedCoefficients) or not isinstance(plan, TrajectoryPlan):
        raise FormatError("guided must be GuidedCoefficients, and of a trajectory plan")
    shape = (len(guided.values), *plan.coefficients.shape)
    check_tensor("guided", guided.coefficients, shape=shape)
    for one in guided.coefficients:
        replace(plan, coefficients=one)  # raises unless a plan can have them


def _check_gain_shape(shape: list[Any]) -> tuple[int, ...]:
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"gain has more than {MAX_DIMENSIONS} dimensions for one sample")
    return tuple(check_count("gain_shape", size, low=1) for size in shape)
