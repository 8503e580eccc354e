"""The policy file: one profile, how plans are fitted to it, and the plans that were refitted.

One file serves every number of steps, size, scheduler and speed-up. A file without plans is a
profile. Knows no pipeline and solves nothing: what later layers do with a policy, its methods find
by name when they are called. The file is specified in ``docs/formats.md``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib import import_module
from io import BytesIO
from typing import Any

from ertacache.core.frontier import KnownSchedule, MeasuredFit
from ertacache.core.gram import Schedule
from ertacache.core.plans import check_compute_steps
from ertacache.core.simulate import Fit
from ertacache.formats.checked import Check
from ertacache.formats.container import Document, open_document, open_regular, pack
from ertacache.formats.files import write_whole
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.fitted import OWN_ROW, FittedPlan, ValidationRow
from ertacache.formats.groups import check_groups, groups_to_json, take_groups
from ertacache.formats.profile import Profile
from ertacache.formats.schema import (
    MAX_STEPS,
    FormatError,
    PolicyError,
    check_count,
    check_number,
    check_strings,
    raising,
    take_record,
)

__all__ = ["OWN_ROW", "Policy", "PolicyError", "ValidationRow"]

MAX_PLANS = 1000
_NUMBER = (float, int)
_FIELDS: dict[str, tuple[type, ...]] = {
    "fingerprint": (dict,),
    "fits": (list,),
    "frontier": (list,),
    "plans": (list,),
    "profile": (dict, type(None)),
    "provenance": (dict,),
    "response": (list,),
    "unit_psnr": (*_NUMBER, type(None)),
}
_FIT: dict[str, tuple[type, ...]] = {
    "computed_steps": (int,),
    "error_ratio": _NUMBER,
    "groups": (dict,),
    "history": (int,),
    "order": (int,),
    "response": (bool,),
    "ridge": _NUMBER,
    "sensitivity": _NUMBER,
    "uniform": (bool,),
}
_KNOWN: dict[str, tuple[type, ...]] = {"mask": (str,), "predicted_error": _NUMBER}


@dataclass(frozen=True, eq=False, repr=False)
class Policy:
    """What is known of a pipeline, to run it with fewer network evaluations.

    Attributes:
        fingerprint: what the calibrated runs were.
        profile: statistics of full runs, from which plans are solved; None if there are only plans.
        plans: plans that were fitted for certain runs, the default first.
        fits: how plans are fitted best, by the number of computed steps, ascending; none if it was
            not measured.
        frontier: the best compute schedule found on the profiled sigmas for ascending numbers of
            computed steps; a search begins with them. Empty if there was none.
        unit_psnr: PSNR in dB of a result whose latent is off by 1, root mean square; None if it
            was not measured.
        response: how much of the error of a latent is in the output of its step, for every
            profiled step; empty if it was not measured.
        provenance: where the file comes from, such as the command line.

    Example:
        >>> import torch
        >>> from ertacache.core.plans import TrajectoryPlan
        >>> from ertacache.formats.fingerprint import hash_config
        >>> sigmas = torch.linspace(1, 0, 5, dtype=torch.float64)
        >>> run = Fingerprint(
        ...     pipeline="FluxPipeline", denoiser="FluxTransformer2DModel",
        ...     denoiser_hash=hash_config({}), prediction="flow",
        ...     scheduler="FlowMatchEulerDiscreteScheduler", scheduler_config={},
        ...     guidance={"guidance_scale": (3.5,)}, dtype="float32", latent_shape=(16, 8, 8),
        ...     versions={},
        ... )
        >>> reuse = sigmas.diff()[:, None]  # plain reuse: Euler with the newest output
        >>> plan = TrajectoryPlan((0, 2), torch.cat([torch.ones(4, 1), reuse], dim=1)[:, None])
        >>> row = ValidationRow("policy", 2, psnr=46.5, speedup=1.9, prompts=24)
        >>> print(Policy(run, plans=(FittedPlan(plan, sigmas, validation=(row,)),)))
        policy for FluxPipeline: no profile, 1 plan
        trajectory: 2 of 4 steps computed, 2.00x fewer
        █·█·
        measured on 24 held-out prompts: 46.5 dB PSNR to the full run, 1.90x faster
    """

    fingerprint: Fingerprint
    _: KW_ONLY
    profile: Profile | None = None
    plans: tuple[FittedPlan, ...] = ()
    fits: tuple[MeasuredFit, ...] = ()
    frontier: tuple[KnownSchedule, ...] = ()
    unit_psnr: float | None = None
    response: tuple[float, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the parts are valid and belong together."""
        with raising(PolicyError):
            if not isinstance(self.fingerprint, Fingerprint):
                kind = type(self.fingerprint).__name__
                raise FormatError(f"fingerprint must be a Fingerprint, not {kind}")
            if self.profile is not None and not isinstance(self.profile, Profile):
                raise FormatError(f"profile must be a Profile, not {type(self.profile).__name__}")
            if self.unit_psnr is not None:
                object.__setattr__(self, "unit_psnr", check_number("unit_psnr", self.unit_psnr))
            for name in ("plans", "fits", "frontier", "response"):
                object.__setattr__(self, name, tuple(getattr(self, name)))
            object.__setattr__(self, "provenance", check_strings("provenance", self.provenance))
            self._check_plans()
            self._check_fits()
            self._check_frontier()
            self._check_response()

    def __repr__(self) -> str:
        """What it is in one line, without its tensors."""
        return f"<{self._headline()}>"

    def __str__(self) -> str:
        """The profile, and every plan with what was measured."""
        return "\n".join([self._headline(), *map(str, self.plans)])

    def _headline(self) -> str:
        known = "no profile"
        if self.profile is not None:
            known = f"a profile of {self.profile.num_runs} runs of {self.profile.num_steps} steps"
        plans = f"{len(self.plans)} plan{'' if len(self.plans) == 1 else 's'}"
        return f"policy for {self.fingerprint.pipeline}: {known}, {plans}"

    @property
    def default(self) -> FittedPlan:
        """The first plan.

        Raises:
            PolicyError: if there is none.
        """
        if not self.plans:
            raise PolicyError("the policy holds no plan yet: give a speed-up, or refit one")
        return self.plans[0]

    def find_plan(self, schedule: Schedule, computed: int) -> FittedPlan | None:
        """The plan for runs on a schedule with so many computed steps, None if there is none.

        A plan of the paper's method, which may change the sigmas, is only followed as the default.
        """
        for plan in self.plans:
            ours = plan.method == "trajectory" and len(plan.compute_steps) == computed
            if ours and plan.fits(schedule):
                return plan
        return None

    def with_plan(self, plan: FittedPlan) -> Policy:
        """This policy with one more plan; one for the same run and budget is replaced."""
        if any(plan.replaces(each) for each in self.plans):
            plans = tuple(plan if plan.replaces(each) else each for each in self.plans)
            return replace(self, plans=plans)
        return replace(self, plans=(*self.plans, plan))

    def merge(self, *others: Policy) -> Policy:
        """Return the profile of all runs of this policy and ``others``.

        Plans, fits and frontier were made from a part of the runs and are left out. Of runs that
        each record their guidance, the values may differ.

        Raises:
            PolicyError: if one has no profile, they are of different pipelines or schedules, or
                share a run.
        """
        facts = self.fingerprint
        for other in others:
            theirs = other.fingerprint
            if facts.guidance_changes(theirs) <= self._recorded() & other._recorded():
                facts = facts.join_guidance(theirs)
                theirs = replace(theirs, guidance=facts.guidance)
            differences = facts.compare(theirs) or theirs.compare(facts)
            if differences:
                listed = ", ".join(map(str, differences))
                raise PolicyError(f"profiles of different runs cannot be merged: {listed}")
        first, *rest = (part._profile() for part in (self, *others))
        return Policy(
            facts,
            profile=first.merge(*rest),
            provenance=_merge_provenance([part.provenance for part in (self, *others)]),
        )

    def _recorded(self) -> set[str]:
        """Arguments that every profiled run records."""
        if self.profile is None:
            return set()
        recorded = ({name for name, _ in run.arguments} for run in self.profile.runs)
        return set.intersection(*recorded)

    def _profile(self) -> Profile:
        if self.profile is None:
            raise PolicyError("a policy without a profile cannot be merged")
        return self.profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to ``path``; an old file stays until the new one is whole."""
        with raising(PolicyError, f"cannot save {os.fspath(path)!r}: "):
            write_whole(path, self._to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy; any problem with the file is a ``PolicyError`` that names it.

        Example:
            >>> Policy.load("absent")
            Traceback (most recent call last):
            ertacache.formats.schema.PolicyError: cannot load 'absent': No such file or directory
        """
        with (
            raising(PolicyError, f"cannot load {os.fspath(path)!r}: "),
            open_regular(path) as (stream, size),
        ):
            return cls._from_document(open_document(stream, size))

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        base_model: str | None = None,
    ) -> str:
        """Upload the policy with a model card; see ``ertacache.hub.push``.

        Returns:
            What was written, as ``attach`` takes it: ``hub:user/repo@commit``.
        """
        options = {
            "private": private,
            "revision": revision,
            "token": token,
            "base_model": base_model,
        }
        return str(_later("hub", "push")(self, repo, **options))

    @classmethod
    def from_pretrained(
        cls, repo: str, *, revision: str | None = None, token: str | None = None
    ) -> Policy:
        """Download a policy from the hub; see ``ertacache.hub.pull``."""
        policy: Policy = _later("hub", "pull")(repo, revision=revision, token=token)
        return policy

    def check(
        self,
        pipe: Any,
        prompts: Sequence[str],
        *,
        speedup: float | Sequence[float] | None = None,
        seed: int = 0,
        batch_size: int = 1,
        **call: Any,
    ) -> Check:
        """Measure what the policy lost on a pipeline; see ``ertacache.calibration.check``."""
        options = {"speedup": speedup, "seed": seed, "batch_size": batch_size}
        found: Check = _later("calibration.check", "check")(self, pipe, prompts, **options, **call)
        return found

    @classmethod
    def _from_bytes(cls, data: bytes, where: str) -> Policy:
        with raising(PolicyError, f"cannot load {where!r}: "):
            return cls._from_document(open_document(BytesIO(data), len(data)))

    @classmethod
    def _from_document(cls, document: Document) -> Policy:
        fields = take_record(document.fields, _FIELDS, "policy")
        profile, plans = fields["profile"], fields["plans"]
        if len(plans) > MAX_PLANS:
            raise FormatError(f"it has {len(plans)} plans, more than the limit of {MAX_PLANS}")
        shapes = {} if profile is None else Profile.shapes(profile)
        for place, plan in enumerate(plans):
            shapes |= FittedPlan.shapes(plan, place)
        tensors = document.read_tensors(shapes)
        steps = None if profile is None else profile["num_steps"]
        return cls(
            Fingerprint._from_json(fields["fingerprint"]),
            profile=None if profile is None else Profile.from_parts(profile, tensors),
            plans=tuple(
                FittedPlan.from_parts(plan, tensors, place) for place, plan in enumerate(plans)
            ),
            fits=tuple(_take_fit(fit, place) for place, fit in enumerate(fields["fits"])),
            frontier=tuple(
                _take_known(known, place, steps) for place, known in enumerate(fields["frontier"])
            ),
            unit_psnr=fields["unit_psnr"],
            response=tuple(fields["response"]),
            provenance=fields["provenance"],
        )

    def _to_bytes(self) -> bytes:
        tensors = {} if self.profile is None else self.profile.tensors()
        for place, plan in enumerate(self.plans):
            tensors |= plan.tensors(place)
        steps = 0 if self.profile is None else self.profile.num_steps
        fields = {
            "fingerprint": self.fingerprint._to_json(),
            "fits": [_fit_to_json(fit) for fit in self.fits],
            "frontier": [_known_to_json(known, steps) for known in self.frontier],
            "plans": [plan.to_json() for plan in self.plans],
            "profile": None if self.profile is None else self.profile.to_json(),
            "provenance": dict(self.provenance),
            "response": list(self.response),
            "unit_psnr": self.unit_psnr,
        }
        return pack(fields, tensors=tensors)

    def _check_plans(self) -> None:
        if len(self.plans) > MAX_PLANS:
            raise FormatError(f"it has {len(self.plans)} plans, more than the limit {MAX_PLANS}")
        for plan in self.plans:
            if not isinstance(plan, FittedPlan):
                raise FormatError(f"plans must hold FittedPlan, not {type(plan).__name__}")
        if self.profile is None and not self.plans:
            raise FormatError("a policy has a profile, plans, or both")

    def _check_response(self) -> None:
        if not self.response:
            return
        if self.profile is None or len(self.response) != self.profile.num_steps:
            raise FormatError("response must have one number for every step of the profile")
        checked = tuple(check_number("response", value) for value in self.response)
        object.__setattr__(self, "response", checked)

    def _check_fits(self) -> None:
        for fit in self.fits:
            if not isinstance(fit, MeasuredFit):
                raise FormatError(f"fits must hold MeasuredFit, not {type(fit).__name__}")
            check_count("computed_steps", fit.computed, low=1, high=MAX_STEPS)
            self._check_fit(fit.fit)
        computed = [fit.computed for fit in self.fits]
        if computed != sorted(set(computed)):
            raise FormatError("fits must ascend in their number of computed steps")

    def _check_fit(self, fit: Fit) -> None:
        check_count("history", fit.history, low=1)
        check_count("order", fit.order)
        for name in ("ridge", "sensitivity"):
            check_number(name, getattr(fit, name), low=0.0)
        groups = check_groups(fit.groups)
        finest = None if self.profile is None else self.profile.finest
        if finest is not None and not groups.consist_of(finest):
            raise FormatError(f"fits have {groups}, but the profile knows {finest}")
        if fit.response and not self.response:
            raise FormatError("fits need the response of the outputs, and there is none")
        if fit.branch:
            raise FormatError("a measured fit has no second history: only plans have one")

    def _check_frontier(self) -> None:
        if not self.frontier:
            return
        if self.profile is None:
            raise FormatError("a frontier is of a profile, and there is none")
        for known in self.frontier:
            if not isinstance(known, KnownSchedule):
                raise FormatError(f"frontier must hold KnownSchedule, not {type(known).__name__}")
            check_compute_steps(known.compute_steps, self.profile.num_steps)
            check_number("predicted_error", known.predicted_error, low=0.0)
        sizes = [len(known.compute_steps) for known in self.frontier]
        if sizes != sorted(set(sizes)):
            raise FormatError("the frontier must ascend in its number of computed steps")


def _later(module: str, name: str) -> Any:
    """A function of a later layer: a policy offers it, and does not depend on it."""
    return getattr(import_module(f"ertacache.{module}"), name)


def _fit_to_json(found: MeasuredFit) -> dict[str, object]:
    return {
        "computed_steps": found.computed,
        "error_ratio": float(found.error_ratio),
        "groups": groups_to_json(found.fit.groups),
        "history": found.fit.history,
        "order": found.fit.order,
        "response": found.fit.response,
        "ridge": float(found.fit.ridge),
        "sensitivity": float(found.fit.sensitivity),
        "uniform": found.uniform,
    }


def _take_fit(value: object, place: int) -> MeasuredFit:
    record = take_record(value, _FIT, f"fits[{place}]")
    fit = Fit(
        record["history"],
        float(record["ridge"]),
        float(record["sensitivity"]),
        record["order"],
        take_groups(record["groups"], f"fits[{place}].groups"),
        response=record["response"],
    )
    return MeasuredFit(
        record["computed_steps"], fit, float(record["error_ratio"]), record["uniform"]
    )


def _known_to_json(known: KnownSchedule, num_steps: int) -> dict[str, object]:
    computed = set(known.compute_steps)
    mask = "".join("1" if k in computed else "0" for k in range(num_steps))
    return {"mask": mask, "predicted_error": float(known.predicted_error)}


def _take_known(value: object, place: int, num_steps: int | None) -> KnownSchedule:
    record = take_record(value, _KNOWN, f"frontier[{place}]")
    mask = record["mask"]
    if not set(mask) <= {"0", "1"}:
        raise FormatError(f"frontier[{place}].mask must consist of 0 and 1")
    if num_steps is not None and len(mask) != num_steps:
        raise FormatError(f"frontier[{place}].mask has {len(mask)} digits for {num_steps} steps")
    steps = tuple(k for k, digit in enumerate(mask) if digit == "1")
    return KnownSchedule(steps, float(record["predicted_error"]))


def _merge_provenance(parts: list[Mapping[str, str]]) -> dict[str, str]:
    """All entries by name; where parts differ, each of their lines once."""
    lines: dict[str, dict[str, None]] = {}
    for name, text in (entry for part in parts for entry in part.items()):
        lines.setdefault(name, {}).update(dict.fromkeys(text.split("\n")))
    return {name: "\n".join(found) for name, found in lines.items()}
