"""What the jobs of the app return: a prediction, two results compared, a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ertacache.formats.policy import Policy, ValidationRow

__all__ = ["Cancelled", "Opened", "Outcome", "Prediction", "Report"]

Report = Callable[[str, int, int], None]
"""Receives a stage, the work done in it, and the total; a total of 0 is unknown."""


class Cancelled(Exception):  # noqa: N818  not an error: it was asked for
    """Raised in a job that was cancelled."""


@dataclass(frozen=True)
class Prediction:
    """What is known of a run before it starts.

    Attributes:
        computed: network evaluations under the policy, per guidance branch.
        num_steps: those of the full run.
        psnr: predicted PSNR to the full run in dB; None if it cannot be predicted.
        why: why it cannot.
        measured: what the calibration measured of this very run; None if it did not.
        ready: whether there is a policy to generate with.
    """

    computed: int
    num_steps: int
    psnr: float | None = None
    why: str = ""
    measured: ValidationRow | None = None
    ready: bool = True


@dataclass(frozen=True, eq=False)
class Opened:
    """A policy that was made or opened.

    Attributes:
        policy: the policy.
        notes: warnings that came with it.
        file: its name in the working folder; None if it is not there.
    """

    policy: Policy
    notes: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """One request, generated twice.

    Attributes:
        full: result of the full run, (3, height, width) or (frames, 3, height, width), 0 to 1.
        accelerated: result under the policy, of the same shape.
        full_seconds: of the full run.
        seconds: of the accelerated run.
        compute_steps: the steps that were computed.
        num_steps: steps of the run.
        scores: PSNR, SSIM and LPIPS by name; a string says why one is not available.
        notes: warnings of the runs.
    """

    full: Tensor
    accelerated: Tensor
    full_seconds: float
    seconds: float
    compute_steps: tuple[int, ...]
    num_steps: int
    scores: dict[str, float | str]
    notes: tuple[str, ...] = ()
