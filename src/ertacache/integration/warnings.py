"""Runtime warnings about a run, each issued once per handle, with a remedy.

Whether numbers are finite is computed on the device and read when the run is over, so that no step
waits for the device.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["RunWarnings"]

_OUTPUT = (
    "the network's output on step {step} held NaN or infinity, and so does the result: reuse did "
    "not cause it and cannot repair it; detach the policy and run again to see the model alone, "
    "and try bfloat16 or float32"
)
_LATENT = (
    "the result holds NaN or infinity, although every output of the network was finite: the "
    "policy's steps left the range of {dtype}; use a policy with more computed steps, or float32"
)
# Both only in runs whose arguments are not the calibrated ones, or that a callback may change.
_CALLS = (
    "step {step} called the network {now} times, the computed step before it {before} times: a "
    "reused step does not follow guidance that changes during a run, which is right only if the "
    "policy was calibrated with it; calibrate with the arguments of this call"
)
_INPUT = (
    "the network's input changed its shape at reused step {step}, so it was computed: a callback "
    "that changes guidance during a run is right only if the policy was calibrated with it; "
    "calibrate with the arguments of this call"
)
_NO_EFFECT = (
    "the policy had no effect, and every step was computed: the loop called the network {calls} "
    "times, but never {method} of pipe.scheduler (that of a copy does not count); call its "
    "set_timesteps before the loop, and its step for every update of the latent"
)
_LAYOUT = (
    "the plan divides the latent into channels and bands, but those of a latent of shape {shape} "
    "are not known in this pipeline, so every step is computed: calibrate with this pipeline"
)
_BRANCH = (
    "the plan combines the output of one guidance branch, but step {step} has none, so it and all "
    "that follow are computed: run with guidance from the first step to the last, or calibrate "
    "with the arguments of this call"
)
_NO_GUIDANCE = (
    "the plan combines the output of one guidance branch, and this run has no guidance, so a plan "
    "without it is followed: calibrate with the arguments of this call for one that was refitted"
)
_SHAPE = (
    "the latent changed its shape from {before} to {now} at step {step}, so the cached outputs do "
    "not fit: the rest of the run is computed; detach the policy for such runs"
)


class RunWarnings:
    """The warnings of one handle."""

    def __init__(self) -> None:
        """Begin with nothing reported and nothing watched."""
        self._reported: set[str] = set()
        self._outputs: dict[int, Tensor] = {}
        self._latent: tuple[Tensor, torch.dtype] | None = None

    def watch_output(self, step: int, output: Tensor) -> None:
        """Compute on the device whether the output of a computed step is finite."""
        self._outputs[step] = torch.isfinite(output).all()

    def watch_latent(self, latent: Tensor) -> None:
        """Compute the same for the last latent of a run."""
        self._latent = torch.isfinite(latent).all(), latent.dtype

    def forget(self) -> None:
        """Drop what was watched in a run that failed: its error says more."""
        self._outputs, self._latent = {}, None

    def report(self) -> None:
        """Warn if numbers were not finite; waits for the device once."""
        outputs, latent = self._outputs, self._latent
        self.forget()
        if latent is not None:
            outputs = {**outputs, -1: latent[0]}
        if not outputs:
            return
        finite = torch.stack([*outputs.values()]).tolist()
        bad = [step for step, good in zip(outputs, finite, strict=True) if not good]
        if not bad:
            return
        if bad[0] >= 0:
            warnings.warn(_OUTPUT.format(step=bad[0]), stacklevel=2)
        elif latent is not None:
            dtype = str(latent[1]).removeprefix("torch.")
            warnings.warn(_LATENT.format(dtype=dtype), stacklevel=2)

    def warn_of_calls(self, step: int, *, now: int, before: int) -> None:
        """A reused step called the network more or less often than a computed one."""
        self._warn("calls", _CALLS.format(step=step, now=now, before=before))

    def warn_of_input(self, step: int) -> None:
        """A step had to be computed, because the network's input changed its shape."""
        self._warn("input", _INPUT.format(step=step))

    def warn_of_shape(self, step: int, *, now: torch.Size, before: torch.Size) -> None:
        """The latent changed its shape within a run."""
        self._warn("shape", _SHAPE.format(step=step, now=tuple(now), before=tuple(before)))

    def warn_of_no_effect(self, method: str, calls: int) -> None:
        """A loop did without a method of the scheduler, so that no step of it was seen."""
        self._warn("no effect", _NO_EFFECT.format(method=method, calls=calls))

    def warn_of_layout(self, shape: tuple[int, ...]) -> None:
        """The plan has groups, and the layout of the latent is not known."""
        self._warn("layout", _LAYOUT.format(shape=shape))

    def warn_of_branch(self, step: int) -> None:
        """The plan has a second history, and the step has no guidance."""
        self._warn("branch", _BRANCH.format(step=step))

    def warn_of_no_guidance(self) -> None:
        """The plan has a second history, the run has no guidance, and another plan is followed."""
        self._warn("no guidance", _NO_GUIDANCE)

    def first(self, kind: str) -> bool:
        """Return whether ``kind`` was not reported before; from now on it was."""
        new = kind not in self._reported
        self._reported.add(kind)
        return new

    def _warn(self, kind: str, sentence: str) -> None:
        if self.first(kind):
            warnings.warn(sentence, stacklevel=2)
