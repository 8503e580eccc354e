"""What is told of a run that is not as a policy expects it, each kind once, with what to do.

Whether numbers are finite is asked on the device and read on the host when the run is over, so that
no step waits for the device. Knows no method, no network and no scheduler.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["Guards"]

_OUTPUT = (
    "the network's output on step {step} held NaN or infinity, and so does the result: reuse did "
    "not cause it and cannot repair it; detach the policy and run again to see the model alone, "
    "and try bfloat16 or float32"
)
_LATENT = (
    "the result holds NaN or infinity, although every output of the network was finite: the "
    "policy's steps left the range of {dtype}; use a policy with more computed steps, or float32"
)
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
_SHAPE = (
    "the latent changed its shape from {before} to {now} at step {step}, and what was kept is of "
    "no use: the rest of the run is computed; detach the policy for such runs"
)


class Guards:
    """The warnings of one handle."""

    def __init__(self) -> None:
        """Begin with nothing told and nothing watched."""
        self._told: set[str] = set()
        self._outputs: dict[int, Tensor] = {}
        self._latent: tuple[Tensor, torch.dtype] | None = None

    def watch_output(self, step: int, output: Tensor) -> None:
        """Ask whether the output of a computed step is finite, without waiting for the answer."""
        self._outputs[step] = torch.isfinite(output).all()

    def watch_latent(self, latent: Tensor) -> None:
        """Ask the same of the last latent of a run."""
        self._latent = torch.isfinite(latent).all(), latent.dtype

    def forget(self) -> None:
        """Drop the questions of a run that failed: its error says more."""
        self._outputs, self._latent = {}, None

    def report(self) -> None:
        """Read the answers and warn if numbers were not finite; waits for the device once."""
        outputs, latent = self._outputs, self._latent
        self.forget()
        if latent is not None:
            outputs = {**outputs, -1: latent[0]}
        if not outputs:
            return
        answers = torch.stack([*outputs.values()]).tolist()
        bad = [step for step, finite in zip(outputs, answers, strict=True) if not finite]
        if not bad:
            return
        if bad[0] >= 0:
            warnings.warn(_OUTPUT.format(step=bad[0]), stacklevel=2)
        elif latent is not None:
            dtype = str(latent[1]).removeprefix("torch.")
            warnings.warn(_LATENT.format(dtype=dtype), stacklevel=2)

    def tell_calls(self, step: int, *, now: int, before: int) -> None:
        """Tell that a reused step called the network more or less often than a computed one."""
        self._tell("calls", _CALLS.format(step=step, now=now, before=before))

    def tell_input(self, step: int) -> None:
        """Tell that a step had to be computed, because its input has another shape."""
        self._tell("input", _INPUT.format(step=step))

    def tell_shape(self, step: int, *, now: torch.Size, before: torch.Size) -> None:
        """Tell that the latent changed its shape within a run."""
        self._tell("shape", _SHAPE.format(step=step, now=tuple(now), before=tuple(before)))

    def _tell(self, kind: str, sentence: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(sentence, stacklevel=2)
