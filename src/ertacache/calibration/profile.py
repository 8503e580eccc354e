"""Profiling: one full run per prompt, saved as it goes, resumed where it stopped."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ertacache
from ertacache.calibration.recorder import profile_trajectory
from ertacache.calibration.rehearsal import check_call
from ertacache.calibration.session import Progress, Session
from ertacache.core.gram import Trajectory
from ertacache.formats.lock import locked
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import fingerprint, guidance_number
from ertacache.integration.private_api import Pipeline

__all__ = ["call_guidance", "check_continued", "profile", "profile_runs"]


def profile(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    batch_size: int = 1,
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    provenance: Mapping[str, str] | None = None,
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
            process can write it meanwhile.
        progress: called with the runs done and the runs in all.
        provenance: strings to keep in the profile besides the call, such as the command line.
        **call: arguments of the pipeline, such as ``num_inference_steps`` and ``height``.

    Returns:
        A policy that holds the profile of all prompts, and no plan yet.

    Raises:
        PolicyError: if the file at ``path`` is damaged or of another pipeline.
        ValueError: if another process is writing it.
    """
    check_call(pipe, "prompt", "generator")
    session = Session(pipe, call, batch_size=batch_size, stage=lambda name: progress)
    return profile_runs(
        session, session.number_runs(prompts, seed), path=path, provenance=provenance
    )


def profile_runs(
    session: Session,
    runs: Sequence[ProfiledPrompt],
    *,
    path: str | os.PathLike[str] | None = None,
    provenance: Mapping[str, str] | None = None,
    keep: Collection[ProfiledPrompt] = (),
) -> Policy:
    """Profile numbered runs in a session, which keeps the latents of ``keep``."""
    with nullcontext() if path is None else locked(path):
        return _continue_profile(session, runs, path=path, provenance=provenance, keep=keep)


def _continue_profile(
    session: Session,
    runs: Sequence[ProfiledPrompt],
    *,
    path: str | os.PathLike[str] | None,
    provenance: Mapping[str, str] | None,
    keep: Collection[ProfiledPrompt],
) -> Policy:
    """Profile the runs that are missing in the file at ``path``, which is locked."""
    known = None if path is None or not Path(path).exists() else Policy.load(path)
    if known is not None:
        check_continued(known, session)
    done_before = () if known is None or known.profile is None else known.profile.runs
    missing = [run for run in runs if run not in done_before]
    if known is not None and (known.plans or known.fits) and missing:
        raise PolicyError(
            f"the policy there holds {'fitted plans' if known.plans else 'measured fits'}, which "
            "would be lost if runs were added to its profile: write to another file"
        )
    done, progress = len(runs) - len(missing), session.progress("profile")
    origin = {
        "ertacache": ertacache.__version__,
        "call": _call_text(session.call | session.varied),
    }
    folds = session.folds(runs)
    for batch in session.batches(missing):
        fresh = _profile_batch(session, batch, keep, folds)
        fresh = replace(fresh, provenance=origin | dict(provenance or {}))
        known = fresh if known is None else known.merge(fresh)
        if path is not None:
            known.save(path)
        done += len(batch)
        progress(done, len(runs))
    if known is None:
        raise PolicyError("nothing was profiled")
    return known


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
