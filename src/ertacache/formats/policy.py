"""The policy file: which steps are computed, what the others do, and how well it was seen to work.

Knows no pipeline and solves nothing. The file is specified in ``docs/formats.md``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from io import BytesIO
from typing import Literal

import torch
from torch import Tensor

from ertacache.core.plan import PaperPlan, TrajectoryPlan, check_compute_steps
from ertacache.formats.checks import (
    FormatError,
    check_count,
    check_number,
    check_text,
    check_texts,
    raising,
)
from ertacache.formats.container import Document, open_document, open_regular, pack, write_atomic
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.planrecord import build_plan, check_plan, plan_parts, plan_shapes
from ertacache.formats.profile import Profile, check_table, profile_shapes, take_prompts
from ertacache.formats.strictjson import take_record

__all__ = ["Policy", "PolicyError", "ValidationRow"]

KIND = "ertacache-policy"
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


class PolicyError(FormatError):
    """A policy is not valid, or its file cannot be read or written."""


@dataclass(frozen=True)
class ValidationRow:
    """One measured way of sampling on held-out prompts.

    Attributes:
        method: what was run, such as ``"policy"``, ``"plain reuse"`` or ``"fewer steps"``.
        computed_steps: steps on which the network ran.
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
            check_text("method", self.method)
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


@dataclass(frozen=True, eq=False)
class Policy:
    """A plan with the run it was made for and the evidence that it works.

    Attributes:
        plan: what a run does on every step.
        sigmas: nominal sigma table, shape (T + 1,), float64, strictly descending.
        fingerprint: what the calibrated run was.
        predicted_error: error that the solver predicted; None if there was none.
        validation: measurements on held-out prompts.
        provenance: where the policy comes from, free texts such as the command line.
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
        >>> plan = TrajectoryPlan((0, 2), latent=torch.ones(4).double(), outputs=reuse)
        >>> policy = Policy(plan, sigmas, fingerprint=run)
        >>> policy.method, policy.reuse_steps, policy.speedup
        ('trajectory', (1, 3), 2.0)
    """

    plan: TrajectoryPlan | PaperPlan
    sigmas: Tensor
    _: KW_ONLY
    fingerprint: Fingerprint
    predicted_error: float | None = None
    validation: tuple[ValidationRow, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    profile: Profile | None = None

    def __post_init__(self) -> None:
        """Check that the parts are valid and belong together."""
        with raising(PolicyError):
            check_table(self.fingerprint, self.sigmas)
            check_plan(self.plan, self.num_steps)
            if self.predicted_error is not None:
                error = check_number("predicted_error", self.predicted_error, low=0.0)
                object.__setattr__(self, "predicted_error", error)
            object.__setattr__(self, "validation", tuple(self.validation))
            object.__setattr__(self, "provenance", check_texts("provenance", self.provenance))
            self._check_validation()
            self._check_profile()

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
        """Steps on which the network runs, ascending."""
        return check_compute_steps(self.plan.compute_steps, self.num_steps)

    @property
    def reuse_steps(self) -> tuple[int, ...]:
        """Steps on which it does not, ascending."""
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
            return cls._from_document(open_document(stream, size, kind=KIND))

    @classmethod
    def _from_bytes(cls, data: bytes, where: str) -> Policy:
        with raising(PolicyError, f"cannot load {where!r}: "):
            return cls._from_document(open_document(BytesIO(data), len(data), kind=KIND))

    @classmethod
    def _from_document(cls, document: Document) -> Policy:
        fields = take_record(document.fields, _FIELDS, "policy")
        fingerprint = Fingerprint._from_json(fields["fingerprint"])
        steps = fingerprint.num_steps
        rows = tuple(ValidationRow._from_json(row, k) for k, row in enumerate(fields["validation"]))
        shapes = {"sigmas": (steps + 1,), **plan_shapes(fields["plan"], steps)}
        prompts = None
        if fields["profile"] is not None:
            record = take_record(fields["profile"], {"prompts": (list,)}, "profile")
            prompts = take_prompts(record["prompts"])
            packed = profile_shapes(steps, len(prompts))
            shapes |= {f"profile.{name}": shape for name, shape in packed.items()}
        tensors = document.read_tensors(shapes)
        profile, sigmas = None, tensors["sigmas"]
        if prompts is not None:
            parts = {name.removeprefix("profile."): value for name, value in tensors.items()}
            profile = Profile._from_parts(fingerprint, sigmas, prompts, tensors=parts)
        return cls(
            build_plan(fields["plan"], tensors),
            sigmas,
            fingerprint=fingerprint,
            predicted_error=fields["predicted_error"],
            validation=rows,
            provenance=fields["provenance"],
            profile=profile,
        )

    def _to_bytes(self) -> bytes:
        record, tensors = plan_parts(self.plan)
        tensors["sigmas"] = self.sigmas
        prompts = None
        if self.profile is not None:
            prompts = {"prompts": self.profile._prompts_json()}
            tensors |= {f"profile.{name}": t for name, t in self.profile._tensors().items()}
        fields = {
            "fingerprint": self.fingerprint._to_json(),
            "plan": record | {"compute_steps": self.compute_steps, "method": self.method},
            "predicted_error": self.predicted_error,
            "profile": prompts,
            "provenance": self.provenance,
            "validation": [row._to_json() for row in self.validation],
        }
        return pack(KIND, fields, tensors=tensors)

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
            raise FormatError("the embedded profile has another sigma table")
