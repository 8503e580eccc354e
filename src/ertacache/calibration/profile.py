"""Profiling: one full run per prompt, saved as it goes, resumed where it stopped."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ertacache
from ertacache.calibration.recorder import profile_trajectory
from ertacache.calibration.rehearsal import check_call
from ertacache.calibration.session import Progress, Session, open_session
from ertacache.calibration.sharing import Record
from ertacache.core.gram import Trajectory
from ertacache.distributed import ALONE, Processes
from ertacache.formats.lock import locked
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import fingerprint, guidance_number
from ertacache.integration.private_api import Pipeline

__all__ = ["call_guidance", "check_continued", "profile", "profile_runs"]

NAME = "profile"  # of the work, among the parts


def profile(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    batch_size: int = 1,
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    provenance: Mapping[str, str] | None = None,
    processes: Processes = ALONE,
    **call: Any,
) -> Policy:
    """Profile a pipeline: one full run per prompt, without decoding.

    A pipeline's argument may be a list of values, which the prompts are spread over, such as
    ``guidance_scale=[2, 5]``.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        prompts: the calibration prompts.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline.
        path: file to write after every batch. If it is there, its runs are not run again. No other
            process can write it meanwhile. Of several processes the main one writes it, and a
            folder beside it keeps the runs that are not in it yet.
        progress: called with the runs done and the runs in all.
        provenance: strings to keep in the profile besides the call, such as the command line.
        processes: those that share the runs, each with the same pipeline and arguments.
        **call: arguments of the pipeline, such as ``num_inference_steps`` and ``height``.

    Returns:
        A policy that holds the profile of all prompts, and no plan yet.

    Raises:
        PolicyError: if the file at ``path`` is damaged or of another pipeline.
        ValueError: if another process is writing it.
    """
    check_call(pipe, "prompt", "generator")
    with open_session(
        pipe,
        call,
        batch_size=batch_size,
        stage=lambda name: progress,
        processes=processes,
        beside=path,
    ) as session:
        runs = session.number_runs(prompts, seed)
        session.check_values(runs)
        return profile_runs(session, runs, path=path, provenance=provenance)


def profile_runs(
    session: Session,
    runs: Sequence[ProfiledPrompt],
    *,
    path: str | os.PathLike[str] | None = None,
    provenance: Mapping[str, str] | None = None,
    keep: Collection[ProfiledPrompt] = (),
) -> Policy:
    """Profile numbered runs in a session, which keeps the latents of ``keep``."""
    mine = path if session.sharing.processes.is_main else None  # one process writes
    with nullcontext() if mine is None else locked(mine):
        known = _read_known(session, mine)
        return _Profiling(session, runs, mine, provenance or {}, keep).extend(known)


def _read_known(session: Session, path: str | os.PathLike[str] | None) -> Policy | None:
    """The profile so far, as the main process finds it."""
    there = path is not None and Path(path).exists()
    known = Policy.load(path) if there and path is not None else None
    if known is not None:
        check_continued(known, session)
    if session.sharing.processes.count == 1:
        return known
    data = b"" if known is None else known._to_bytes()
    found = session.sharing.processes.from_main("known profile", data)
    return Policy._from_bytes(found, "the profile") if found else None


@dataclass(frozen=True, eq=False)
class _Profiling:
    """Runs to be profiled.

    Attributes:
        session: the pipeline.
        runs: all that the profile is to have.
        path: the file, locked; None in all processes but the main one.
        provenance: strings to keep in the profile.
        keep: runs whose latents stay.
    """

    session: Session
    runs: Sequence[ProfiledPrompt]
    path: str | os.PathLike[str] | None
    provenance: Mapping[str, str]
    keep: Collection[ProfiledPrompt]

    def extend(self, known: Policy | None) -> Policy:
        """Profile the runs that are missing, in the batches of an undisturbed profile."""
        session = self.session
        there = set(() if known is None or known.profile is None else known.profile.runs)
        batches = [[run for run in batch if run not in there] for batch in self._batches()]
        missing = [batch for batch in batches if batch]
        if known is not None and (known.plans or known.fits) and missing:
            raise PolicyError(
                f"the policy there holds {'fitted plans' if known.plans else 'measured fits'}, "
                "which would be lost if runs were added to its profile: write to another file"
            )
        finished = [batch for batch in self._batches() if all(run in there for run in batch)]
        session.sharing.count_done(NAME, finished)
        done, progress = len(self.runs) - sum(map(len, missing)), session.progress("profile")
        folds = session.folds(self.runs)
        found = session.sharing.share(
            NAME,
            missing,
            lambda batch: _pack(_profile_batch(session, batch, self.keep, folds)),
            owners=session.own(missing),
        )
        for batch, record in zip(missing, found, strict=True):
            fresh = replace(_unpack(record), provenance=self._origin())
            known = fresh if known is None else self._merged(known, fresh)
            if self.path is not None:
                known.save(self.path)
                session.sharing.note_done(NAME, batch)
            done += len(batch)
            progress(done, len(self.runs))
        if known is None:
            raise PolicyError("nothing was profiled")
        return known

    def _merged(self, known: Policy, fresh: Policy) -> Policy:
        """The runs of both; each may have guidance that the pipeline derived from a varied one.

        Wan 2.2 gives its second network the scale of the first, if it has none of its own.
        """
        if self.session.varied:
            both = known.fingerprint.join_guidance(fresh.fingerprint).guidance
            known, fresh = (
                replace(one, fingerprint=replace(one.fingerprint, guidance=both))
                for one in (known, fresh)
            )
        return known.merge(fresh)

    def _batches(self) -> list[list[ProfiledPrompt]]:
        return self.session.batches(self.runs)

    def _origin(self) -> dict[str, str]:
        call = _call_text(self.session.call | self.session.varied)
        return {"ertacache": ertacache.__version__, "call": call} | dict(self.provenance)


def _pack(policy: Policy) -> Record:
    """A policy as a record, to be kept and exchanged."""
    return {"policy": torch.frombuffer(bytearray(policy._to_bytes()), dtype=torch.uint8)}


def _unpack(record: Record) -> Policy:
    return Policy._from_bytes(record["policy"].numpy().tobytes(), "a profiled run")


def _profile_batch(
    session: Session,
    batch: Sequence[ProfiledPrompt],
    keep: Collection[ProfiledPrompt],
    folds: Mapping[ProfiledPrompt, int],
) -> Policy:
    found = session.record(batch, phase="profile", keep=keep)
    run = Trajectory(
        tuple(x.cpu() for x in found.run.latents), tuple(v.cpu() for v in found.run.outputs)
    )
    # What the call was run with; of a varied argument all values, so that batches can be merged.
    recorded = {k: values for k, values in found.guidance.items() if k not in session.varied}
    facts = fingerprint(
        session.pipe,
        latent_shape=run.latents[0].shape[1:],
        guidance=call_guidance(session) | recorded,
    )
    profile = profile_trajectory(
        run,
        found.schedule,
        batch,
        folds=[folds[run] for run in batch],
        layout=found.layout,
        expert_steps=found.expert_steps,
    )
    return Policy(facts, profile=profile)


def call_guidance(session: Session) -> dict[str, tuple[float, ...]]:
    """Guidance arguments of a session's call, each with all values that it has."""
    found = {}
    for name, value in (session.call | session.varied).items():
        values = [guidance_number(name, v) for v in (value if isinstance(value, list) else [value])]
        numbers = [number for number in values if number is not None]
        if numbers and len(numbers) == len(values):
            found[name] = tuple(sorted(set(numbers)))
    return found


def check_continued(known: Policy, session: Session) -> None:
    """Raise unless a profile can be continued by the calls of a session.

    What only a run shows, such as the size of the latent, is compared when a run is added.
    """
    if known.profile is None:
        raise PolicyError("the policy there has no profile to be continued")
    was, steps = known.fingerprint, session.call.get("num_inference_steps")
    now = fingerprint(
        session.pipe,
        latent_shape=was.latent_shape,
        guidance=dict(was.guidance) | call_guidance(session),
    )
    reasons = [str(difference) for difference in was.compare(now)]
    whole = known.profile.schedule.begun  # image to image takes fewer than num_inference_steps
    if whole and isinstance(steps, int) and steps != known.profile.num_steps:
        reasons.append(f"num_inference_steps is {steps}, was {known.profile.num_steps}")
    if reasons:
        raise PolicyError(f"the profile there cannot be continued: {', '.join(reasons)}")


def _call_text(call: Mapping[str, Any]) -> str:
    """The pipeline's arguments in one line; what is no plain value by its type only."""
    plain = (str, int, float, bool, type(None), list, tuple)
    return ", ".join(
        f"{name}={value!r}" if isinstance(value, plain) else f"{name}: {type(value).__name__}"
        for name, value in sorted(call.items())
    )
