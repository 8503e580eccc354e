"""Profiling: one untouched run per prompt, written down as it goes, resumed where it stopped.

Knows how a pipeline is called, not what is made of its profile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ertacache
from ertacache.core.gram import profile_run
from ertacache.core.solver import Trajectory
from ertacache.formats.firststeps import note_first_steps
from ertacache.formats.profile import Profile, ProfiledPrompt, ProfileError
from ertacache.integration import fingerprint, nominal, record
from ertacache.integration.compat import Pipeline

__all__ = [
    "Progress",
    "check_continued",
    "generators",
    "number_runs",
    "profile",
    "split_runs",
]

Progress = Callable[[int, int], None]
"""Called with the runs done and the runs in all."""

Observer = Callable[[Sequence[ProfiledPrompt], Trajectory], None]


def number_runs(prompts: Sequence[str], seed: int = 0) -> list[ProfiledPrompt]:
    """Give each prompt a seed of its own, counting up from ``seed``.

    Example:
        >>> number_runs(["a cat", "a dog"], seed=7)
        [ProfiledPrompt(prompt='a cat', seed=7), ProfiledPrompt(prompt='a dog', seed=8)]
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts must be a list of at least one text")
    return [ProfiledPrompt(prompt, seed + k) for k, prompt in enumerate(prompts)]


def generators(runs: Sequence[ProfiledPrompt]) -> list[torch.Generator]:
    """The noise of each run, the same on every device and in every batch."""
    return [torch.Generator("cpu").manual_seed(run.seed) for run in runs]


def split_runs(runs: Sequence[ProfiledPrompt], size: int) -> Iterator[list[ProfiledPrompt]]:
    """Batches of at most ``size`` runs, in order."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    for start in range(0, len(runs), size):
        yield list(runs[start : start + size])


def profile(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    batch_size: int = 1,
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
    provenance: Mapping[str, str] | None = None,
    **call: Any,
) -> Profile:
    """Profile a pipeline: run it untouched on every prompt, without decoding.

    Args:
        pipe: a diffusers pipeline with a deterministic scheduler.
        prompts: the calibration prompts.
        seed: seed of the first prompt's noise; the others count up.
        batch_size: prompts per call of the pipeline.
        path: file to write after every batch. If it is there, its runs are not run again.
        progress: called with the runs done and the runs in all.
        observe: sees every run's latents and outputs, on the CPU; for whoever needs more than
            the profile.
        provenance: texts to keep in the profile besides the call, such as the command line.
        **call: arguments of the pipeline, such as ``num_inference_steps`` and ``height``.

    Returns:
        The profile of all prompts, in their order.

    Raises:
        ProfileError: if the file at ``path`` is damaged or of another pipeline.
    """
    wanted = number_runs(prompts, seed)
    known = None if path is None or not Path(path).exists() else Profile.load(path)
    if known is not None:
        check_continued(known, pipe, call)
    missing = [run for run in wanted if known is None or run not in known.prompts]
    done = len(wanted) - len(missing)
    origin = {"ertacache": ertacache.__version__, "call": _call_text(call)} | dict(provenance or {})
    for batch in split_runs(missing, batch_size):
        fresh, run = _profile_batch(pipe, batch, call)
        fresh = replace(fresh, provenance=origin | dict(fresh.provenance))
        known = fresh if known is None else known.merge(fresh)
        if path is not None:
            known.save(path)
        if observe is not None:
            observe(batch, run)
        done += len(batch)
        if progress is not None:
            progress(done, len(wanted))
    if known is None:
        raise ProfileError("nothing was profiled")
    return known


def _call_text(call: Mapping[str, Any]) -> str:
    """The pipeline's arguments in one line; what is no plain value by its type only."""
    plain = (str, int, float, bool, type(None), list, tuple)
    return ", ".join(
        f"{name}={value!r}" if isinstance(value, plain) else f"{name}: {type(value).__name__}"
        for name, value in sorted(call.items())
    )


def check_continued(known: Profile, pipe: Pipeline, call: Mapping[str, Any]) -> None:
    """Raise unless a profile can be continued by calls of this pipeline with these arguments.

    What only a run can tell, such as the size of the latent, is compared when a run is added.
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


def _profile_batch(
    pipe: Pipeline, batch: Sequence[ProfiledPrompt], call: dict[str, Any]
) -> tuple[Profile, Trajectory]:
    texts = [run.prompt for run in batch]
    prompt: str | list[str] = texts[0] if len(texts) == 1 else texts
    found = record(pipe, prompt=prompt, generator=generators(batch), **call)
    run, sigmas = found.run, found.sigmas
    if len(run.latents[0]) != len(batch):
        raise ProfileError(
            f"{len(batch)} prompts gave latents of a batch of {len(run.latents[0])}: "
            "profile with batch_size=1 and one image per prompt"
        )
    run = Trajectory(tuple(x.cpu() for x in run.latents), tuple(v.cpu() for v in run.outputs))
    what = fingerprint(pipe, sigmas=sigmas, latent_shape=run.latents[0].shape[1:])
    first_order, note = nominal(pipe.scheduler), note_first_steps(found.first_steps)
    return Profile(what, sigmas, first_order, profile_run(run), tuple(batch), note), run
