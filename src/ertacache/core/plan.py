"""The two plans: which steps a run computes, and what it does on all of them.

A plan is plain data. It knows neither the model nor the scheduler nor the file it is kept in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

__all__ = ["PaperPlan", "Reuse", "TrajectoryPlan", "check_compute_steps"]

Reuse = Literal["residual", "velocity"]


def check_compute_steps(compute_steps: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """Return ``compute_steps`` as a tuple, or say what is wrong with it.

    Example:
        >>> check_compute_steps([0, 3, 5], 6)
        (0, 3, 5)
    """
    steps = tuple(int(k) for k in compute_steps)
    if not steps or steps[0] != 0:
        raise ValueError("step 0 must be computed: nothing is there to be reused yet")
    if any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"compute_steps must be strictly increasing, got {list(steps)}")
    if steps[-1] >= num_steps:
        raise ValueError(f"compute_steps holds {steps[-1]}, but the run has {num_steps} steps")
    return steps


@dataclass(frozen=True, eq=False)
class TrajectoryPlan:
    """Trajectory rectification: ``x[k+1] = latent[k] x[k] + sum_j outputs[k, j] v[c_j]``.

    Attributes:
        compute_steps: the steps on which the network runs, ascending, the first is 0.
        latent: coefficient of the latent for every step, shape (T,), float64.
        outputs: coefficients of the last H computed outputs, newest first, shape (T, H), float64;
            zero where fewer than H outputs exist.
    """

    compute_steps: tuple[int, ...]
    latent: Tensor
    outputs: Tensor

    def __post_init__(self) -> None:
        """Check shapes, types and finiteness."""
        if self.latent.ndim != 1 or len(self.latent) == 0:
            raise ValueError(f"latent must have shape (T,), got {tuple(self.latent.shape)}")
        if self.outputs.ndim != 2 or len(self.outputs) != self.num_steps:
            raise ValueError(
                f"outputs must have shape ({self.num_steps}, H), got {tuple(self.outputs.shape)}"
            )
        check_compute_steps(self.compute_steps, self.num_steps)
        _check_float64("latent", self.latent)
        _check_float64("outputs", self.outputs)

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.latent)

    @property
    def history(self) -> int:
        """Number of computed outputs kept, H."""
        return self.outputs.shape[1]


@dataclass(frozen=True, eq=False)
class PaperPlan:
    """The paper's method: a reused output, an adjusted sigma table, and a linear rectification.

    Attributes:
        compute_steps: the steps on which the network runs, ascending; first and last included.
        reuse: what a reused step returns, ``"residual"`` (eq. 5, 6) or ``"velocity"``.
        sigmas: the table the run uses, adjusted or not, shape (T + 1,), float64, descending.
        gain: K, shape (T, ...) where ``gain[k]`` broadcasts against one sample; None without
            rectification. Rows of computed steps are not used.
        bias: B, like ``gain``.
    """

    compute_steps: tuple[int, ...]
    reuse: Reuse
    sigmas: Tensor
    gain: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, types, finiteness and order."""
        if self.sigmas.ndim != 1 or len(self.sigmas) < 2:
            raise ValueError(f"sigmas must have shape (T + 1,), got {tuple(self.sigmas.shape)}")
        _check_float64("sigmas", self.sigmas)
        if bool((self.sigmas.diff() > 0).any()):
            raise ValueError("sigmas must not increase")
        steps = check_compute_steps(self.compute_steps, self.num_steps)
        if steps[-1] != self.num_steps - 1:
            raise ValueError("the paper's method computes the last step")
        if self.reuse not in ("residual", "velocity"):
            raise ValueError(f"reuse must be 'residual' or 'velocity', got {self.reuse!r}")
        self._check_rectification()

    def _check_rectification(self) -> None:
        if (self.gain is None) != (self.bias is None):
            raise ValueError("gain and bias come together or not at all")
        if self.gain is None or self.bias is None:
            return
        if self.gain.shape != self.bias.shape or len(self.gain) != self.num_steps:
            raise ValueError(
                f"gain and bias must have shape ({self.num_steps}, ...), "
                f"got {tuple(self.gain.shape)} and {tuple(self.bias.shape)}"
            )
        _check_float64("gain", self.gain)
        _check_float64("bias", self.bias)

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.sigmas) - 1


def _check_float64(name: str, value: Tensor) -> None:
    if value.dtype != torch.float64:
        raise ValueError(f"{name} must be float64, got {value.dtype}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} holds a number that is not finite")
