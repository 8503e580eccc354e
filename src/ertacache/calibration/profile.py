"""Profiling: one full run per prompt, saved as it goes, resumed where it stopped."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ertacache
from ertacache.calibration.session import Progress, Session, number_runs
from ertacache.core.gram import Trajectory, profile_run
from ertacache.formats.profile import Profile, ProfiledPrompt, ProfileError
from ertacache.integration.identity import fingerprint
from ertacache.integration.private_api import Pipeline
from ertacache.integration.schedulers import first_order_update

__all__ = ["check_continued", "profile", "profile_runs"]


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
) -> Profile:
    """Profile a pipeline: one full run per prompt, without decoding.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        prompts: the calibration prompts.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline.
        path: file to write after every batch. If it is there, its runs are not run again.
        progress: called with the runs done and the runs in all.
        provenance: strings to keep in the profile besides the call, such as the command line.
        **call: arguments of the pipeline, such as ``num_inference_steps`` and ``height``.

    Returns:
        The profile of all prompts, in their order.

    Raises:
        ProfileError: if the file at ``path`` is damaged or of another pipeline.
    """
    session = Session(pipe, call, batch_size=batch_size, stage=lambda name: progress)
    runs = number_runs(prompts, seed)
    return profile_runs(session, runs, path=path, provenance=provenance)


def profile_runs(
    session: Session,
    runs: Sequence[ProfiledPrompt],
    *,
    path: str | os.PathLike[str] | None = None,
    provenance: Mapping[str, str] | None = None,
    keep: Collection[ProfiledPrompt] = (),
) -> Profile:
    """Profile numbered runs in a session, which keeps the latents of ``keep``."""
    known = None if path is None or not Path(path).exists() else Profile.load(path)
    if known is not None:
        check_continued(known, session.pipe, session.call)
    missing = [run for run in runs if known is None or run not in known.prompts]
    done, progress = len(runs) - len(missing), session.progress("profile")
    origin = {"ertacache": ertacache.__version__, "call": _call_text(session.call)}
    for batch in session.batches(missing):
        fresh = _profile_batch(session, batch, keep)
        fresh = replace(fresh, provenance=origin | dict(provenance or {}))
        known = fresh if known is None else known.merge(fresh)
        if path is not None:
            known.save(path)
        done += len(batch)
        progress(done, len(runs))
    if known is None:
        raise ProfileError("nothing was profiled")
    return known


def _profile_batch(
    session: Session, batch: Sequence[ProfiledPrompt], keep: Collection[ProfiledPrompt]
) -> Profile:
    found = session.record(batch, phase="profile", keep=keep)
    run, sigmas = found.run, found.sigmas
    run = Trajectory(tuple(x.cpu() for x in run.latents), tuple(v.cpu() for v in run.outputs))
    what = fingerprint(session.pipe, sigmas=sigmas, latent_shape=run.latents[0].shape[1:])
    nominal = first_order_update(session.pipe.scheduler)
    return Profile(
        what, sigmas, nominal, profile_run(run), tuple(batch), expert_steps=found.expert_steps
    )


def check_continued(known: Profile, pipe: Pipeline, call: Mapping[str, Any]) -> None:
    """Raise unless a profile can be continued by calls of this pipeline with these arguments.

    What only a run shows, such as the size of the latent, is compared when a run is added.
    """
    was = known.fingerprint
    now = replace(
        fingerprint(pipe, sigmas=known.sigmas, latent_shape=was.latent_shape),
        num_steps=call.get("num_inference_steps", was.num_steps),
        guidance=call.get("guidance_scale", was.guidance),
    )
    differences = ", ".join(map(str, was.compare(now)))
    if differences:
        raise ProfileError(f"the profile there cannot be continued: {differences}")


def _call_text(call: Mapping[str, Any]) -> str:
    """The pipeline's arguments in one line; what is no plain value by its type only."""
    plain = (str, int, float, bool, type(None), list, tuple)
    return ", ".join(
        f"{name}={value!r}" if isinstance(value, plain) else f"{name}: {type(value).__name__}"
        for name, value in sorted(call.items())
    )
