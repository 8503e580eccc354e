"""The policy file: which steps are computed, what all of them do, and what was measured.

Knows no pipeline and solves nothing. The file is specified in ``docs/formats.md``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from io import BytesIO
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ertacache.core.plans import (
    PaperPlan,
    Reuse,
    TrajectoryPlan,
    check_compute_steps,
    step_strip,
)
from ertacache.formats.container import Document, open_document, open_regular, pack, write_atomic
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.profile import (
    Profile,
    check_expert_steps,
    check_schedule,
    profile_shapes,
    read_expert_steps,
    take_prompts,
    write_expert_steps,
)
from ertacache.formats.schema import (
    MAX_DIMENSIONS,
    FormatError,
    check_count,
    check_number,
    check_string,
    check_strings,
    raising,
    take_list,
    take_record,
)

__all__ = ["Policy", "PolicyError", "ValidationRow"]

MAX_HISTORY = 16
OWN_ROW = "policy"
"""Name of the policy's own row among its measurements."""

_TARGET_PSNR = "min psnr"  # key in the provenance of a file
_NUMBER = (float, int)
_FIELDS: dict[str, tuple[type, ...]] = {
    "fingerprint": (dict,),
    "plan": (dict,),
    "predicted_error": (*_NUMBER, type(None)),
    "profile": (dict, type(None)),
    "provenance": (dict,),
    "validation": (list,),
}
_ROW: dict[str, tuple[type, ...]] = {
    "computed_steps": (int,),
    "method": (str,),
    "prompts": (int,),
    "psnr": (*_NUMBER, type(None)),
    "speedup": _NUMBER,
}

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


class PolicyError(FormatError):
    """A policy is not valid, or its file cannot be read or written."""


@dataclass(frozen=True)
class ValidationRow:
    """One sampling variant, measured on held-out prompts.

    Attributes:
        method: what was run, such as ``"policy"``, ``"plain reuse"`` or ``"fewer steps"``.
        computed_steps: steps on which the network was evaluated.
        psnr: decibels to the full run; infinite where the results are identical.
        speedup: measured time of the full run over that of this one.
        prompts: number of held-out prompts.

    Example:
        >>> ValidationRow("policy", 10, psnr=46.5, speedup=2.9, prompts=24).psnr
        46.5
    """

    method: str
    computed_steps: int
    psnr: float
    speedup: float
    prompts: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        with raising(PolicyError):
            check_string("method", self.method)
            check_count("computed_steps", self.computed_steps, low=1)
            if self.psnr != math.inf:
                object.__setattr__(self, "psnr", check_number("psnr", self.psnr))
            object.__setattr__(self, "speedup", check_number("speedup", self.speedup, low=0.0))
            check_count("prompts", self.prompts, low=1)

    def _to_json(self) -> dict[str, object]:
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return record | {"psnr": None if self.psnr == math.inf else self.psnr}

    @classmethod
    def _from_json(cls, value: object, place: int) -> ValidationRow:
        record = take_record(value, _ROW, f"validation[{place}]")
        psnr = math.inf if record["psnr"] is None else record["psnr"]
        return cls(**(record | {"psnr": psnr}))


@dataclass(frozen=True, eq=False, repr=False)
class Policy:
    """A plan with the run it was made for and the evidence that it works.

    Attributes:
        plan: what a run does on every step.
        sigmas: nominal sigma schedule, shape (T + 1,), float64, strictly descending.
        fingerprint: what the calibrated run was.
        predicted_error: expected distance of the final latent to that of the full run, root mean
            square; None for the paper's method, which predicts none.
        validation: measurements on held-out prompts.
        target_psnr: the PSNR that the policy was calibrated for, in dB; None if for something else.
        expert_steps: steps after 0 at which another network of the pipeline takes over.
        provenance: where the policy comes from, such as the command line.
        profile: the profile it was solved from, to solve it again; None to keep the file small.

    Example:
        >>> from ertacache.formats.fingerprint import hash_config, hash_sigmas
        >>> sigmas = torch.linspace(1, 0, 5, dtype=torch.float64)
        >>> run = Fingerprint(
        ...     pipeline="FluxPipeline", denoiser="FluxTransformer2DModel",
        ...     denoiser_hash=hash_config({}), scheduler="FlowMatchEulerDiscreteScheduler",
        ...     scheduler_config={}, num_steps=4, sigmas_hash=hash_sigmas(sigmas),
        ...     guidance=3.5, dtype="float32", latent_shape=(16, 8, 8), versions={},
        ... )
        >>> reuse = sigmas.diff()[:, None]  # plain reuse: Euler with the newest output
        >>> plan = TrajectoryPlan((0, 2), torch.cat([torch.ones(4, 1), reuse], dim=1)[:, None])
        >>> row = ValidationRow("policy", 2, psnr=46.5, speedup=1.9, prompts=24)
        >>> policy = Policy(plan, sigmas, fingerprint=run, validation=(row,))
        >>> policy.method, policy.reuse_steps, policy.speedup
        ('trajectory', (1, 3), 2.0)
        >>> print(policy)
        trajectory policy for FluxPipeline: 2 of 4 steps computed, 2.00x fewer
        █·█·
        measured on 24 held-out prompts: 46.5 dB PSNR to the full run, 1.90x faster
    """

    plan: TrajectoryPlan | PaperPlan
    sigmas: Tensor
    _: KW_ONLY
    fingerprint: Fingerprint
    predicted_error: float | None = None
    validation: tuple[ValidationRow, ...] = ()
    target_psnr: float | None = None
    expert_steps: tuple[int, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    profile: Profile | None = None

    def __post_init__(self) -> None:
        """Check that the parts are valid and belong together."""
        with raising(PolicyError):
            check_schedule(self.fingerprint, self.sigmas)
            _check_plan(self.plan, self.num_steps)
            if self.predicted_error is not None:
                error = check_number("predicted_error", self.predicted_error, low=0.0)
                object.__setattr__(self, "predicted_error", error)
            object.__setattr__(self, "validation", tuple(self.validation))
            object.__setattr__(self, "provenance", check_strings("provenance", self.provenance))
            if self.target_psnr is not None:
                target = check_number("target_psnr", self.target_psnr)
                object.__setattr__(self, "target_psnr", target)
            experts = check_expert_steps(self.expert_steps, self.num_steps)
            object.__setattr__(self, "expert_steps", experts)
            self._check_validation()
            self._check_profile()

    def __repr__(self) -> str:
        """What it is in one line, without its tensors."""
        steps = f"{len(self.compute_steps)} of {self.num_steps} steps computed"
        return f"<{self.method} policy for {self.fingerprint.pipeline}: {steps}>"

    def __str__(self) -> str:
        """Schedule strip, measured PSNR and speed-up."""
        steps = f"{len(self.compute_steps)} of {self.num_steps} steps computed"
        lines = [
            f"{self.method} policy for {self.fingerprint.pipeline}: {steps}, "
            f"{self.speedup:.2f}x fewer",
            step_strip(self.compute_steps, self.num_steps),
        ]
        row = self.measured
        if row is not None:
            psnr = "identical" if row.psnr == math.inf else f"{row.psnr:.1f} dB PSNR"
            lines.append(
                f"measured on {row.prompts} held-out prompts: {psnr} to the full run, "
                f"{row.speedup:.2f}x faster"
            )
        elif self.predicted_error is not None:
            lines.append(f"not measured; predicted error of the latent {self.predicted_error:.3g}")
        return "\n".join(lines)

    @property
    def method(self) -> Literal["trajectory", "paper"]:
        """Which of the two methods the plan is of."""
        return "trajectory" if isinstance(self.plan, TrajectoryPlan) else "paper"

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return self.fingerprint.num_steps

    @property
    def compute_steps(self) -> tuple[int, ...]:
        """Steps on which the network is evaluated, ascending."""
        return check_compute_steps(self.plan.compute_steps, self.num_steps)

    @property
    def measured(self) -> ValidationRow | None:
        """The row of the policy itself among the measurements; None if there is none."""
        return next((row for row in self.validation if row.method == OWN_ROW), None)

    @property
    def reuse_steps(self) -> tuple[int, ...]:
        """Steps on which it is not, ascending."""
        computed = set(self.compute_steps)
        return tuple(k for k in range(self.num_steps) if k not in computed)

    @property
    def speedup(self) -> float:
        """Steps over computed steps: the speed-up if only the network took time."""
        return self.num_steps / len(self.plan.compute_steps)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to ``path``; an old file stays until the new one is whole."""
        with raising(PolicyError, f"cannot save {os.fspath(path)!r}: "):
            write_atomic(path, self._to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy; any problem with the file is a ``PolicyError`` that names it.

        Example:
            >>> Policy.load("absent")
            Traceback (most recent call last):
            ertacache.formats.policy.PolicyError: cannot load 'absent': No such file or directory
        """
        with (
            raising(PolicyError, f"cannot load {os.fspath(path)!r}: "),
            open_regular(path) as (stream, size),
        ):
            return cls._from_document(open_document(stream, size, kind="policy"))

    @classmethod
    def _from_bytes(cls, data: bytes, where: str) -> Policy:
        with raising(PolicyError, f"cannot load {where!r}: "):
            return cls._from_document(open_document(BytesIO(data), len(data), kind="policy"))

    @classmethod
    def _from_document(cls, document: Document) -> Policy:
        fields = take_record(document.fields, _FIELDS, "policy")
        fingerprint = Fingerprint._from_json(fields["fingerprint"])
        steps = fingerprint.num_steps
        rows = tuple(ValidationRow._from_json(row, k) for k, row in enumerate(fields["validation"]))
        shapes = {"sigmas": (steps + 1,), **_plan_shapes(fields["plan"], steps)}
        prompts = None
        if fields["profile"] is not None:
            record = take_record(fields["profile"], {"prompts": (list,)}, "profile")
            prompts = take_prompts(record["prompts"])
            packed = profile_shapes(steps, len(prompts))
            shapes |= {f"profile.{name}": shape for name, shape in packed.items()}
        tensors = document.read_tensors(shapes)
        profile, sigmas = None, tensors["sigmas"]
        experts, origin = read_expert_steps(fields["provenance"])
        target = _read_target(origin.pop(_TARGET_PSNR, None))
        if prompts is not None:
            parts = {name.removeprefix("profile."): value for name, value in tensors.items()}
            profile = Profile._from_parts(fingerprint, sigmas, prompts, tensors=parts)
            profile = replace(profile, expert_steps=experts)
        return cls(
            _build_plan(fields["plan"], tensors),
            sigmas,
            fingerprint=fingerprint,
            predicted_error=fields["predicted_error"],
            validation=rows,
            target_psnr=target,
            expert_steps=experts,
            provenance=origin,
            profile=profile,
        )

    def _to_bytes(self) -> bytes:
        record, tensors = _plan_parts(self.plan)
        tensors["sigmas"] = self.sigmas
        prompts = None
        if self.profile is not None:
            prompts = {"prompts": self.profile._prompts_json()}
            tensors |= {f"profile.{name}": t for name, t in self.profile._tensors().items()}
        origin = write_expert_steps(self.provenance, self.expert_steps)
        if self.target_psnr is not None:
            origin[_TARGET_PSNR] = _write_target(self.target_psnr)
        fields = {
            "fingerprint": self.fingerprint._to_json(),
            "plan": record | {"compute_steps": self.compute_steps, "method": self.method},
            "predicted_error": self.predicted_error,
            "profile": prompts,
            "provenance": origin,
            "validation": [row._to_json() for row in self.validation],
        }
        return pack("policy", fields, tensors=tensors)

    def _check_validation(self) -> None:
        for row in self.validation:
            if not isinstance(row, ValidationRow):
                raise FormatError(f"validation must hold ValidationRow, not {type(row).__name__}")
            check_count("computed_steps", row.computed_steps, low=1, high=self.num_steps)

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if not isinstance(self.profile, Profile):
            raise FormatError(f"profile must be a Profile, not {type(self.profile).__name__}")
        if self.profile.fingerprint != self.fingerprint:
            raise FormatError("the embedded profile is of another run: its fingerprint differs")
        if not torch.equal(self.profile.sigmas, self.sigmas):
            raise FormatError("the embedded profile has another sigma schedule")
        if self.profile.expert_steps != self.expert_steps:
            raise FormatError("the embedded profile has other expert steps")


def _read_target(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return check_number("target_psnr", float(value))
    except ValueError:
        raise FormatError(f"the provenance {_TARGET_PSNR!r} must be a number") from None


def _write_target(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)  # six digits may not be enough


def _check_plan(plan: object, num_steps: int) -> None:
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


def _plan_shapes(value: dict[str, Any], num_steps: int) -> dict[str, tuple[int, ...]]:
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


def _build_plan(
    record: dict[str, Any], tensors: Mapping[str, Tensor]
) -> TrajectoryPlan | PaperPlan:
    """Return the plan of a record that ``_plan_shapes`` has checked."""
    steps = tuple(take_list(record["compute_steps"], int, "plan.compute_steps"))
    if record["method"] == "trajectory":
        latent, outputs = tensors["plan.latent"], tensors["plan.outputs"]
        return TrajectoryPlan(steps, torch.cat([latent[:, None], outputs], dim=1)[:, None])
    gain, bias = tensors.get("plan.gain"), tensors.get("plan.bias")
    reuse = cast(Reuse, record["reuse"])
    return PaperPlan(steps, reuse, tensors["plan.sigmas"], gain, bias)


def _plan_parts(plan: TrajectoryPlan | PaperPlan) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the record of a plan, without steps and method, and its tensors."""
    if isinstance(plan, TrajectoryPlan):
        z = plan.coefficients[:, 0]
        return {"history": plan.history}, {"plan.latent": z[:, 0], "plan.outputs": z[:, 1:]}
    tensors = {"plan.sigmas": plan.sigmas}
    if plan.gain is None or plan.bias is None:
        return {"gain_shape": None, "reuse": plan.reuse}, tensors
    shape = list(plan.gain.shape[1:])
    tensors |= {"plan.gain": plan.gain, "plan.bias": plan.bias}
    return {"gain_shape": shape, "reuse": plan.reuse}, tensors
