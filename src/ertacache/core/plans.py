"""The two plans as data: which steps a run computes, and what it does on each of them.

A plan knows neither the model nor the scheduler nor the file it is kept in. The rule from a
speed-up to a number of computed steps stands here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ertacache.core.groups import ONE_GROUP, Groups

__all__ = [
    "PaperPlan",
    "Reuse",
    "Target",
    "TrajectoryPlan",
    "check_compute_steps",
    "step_strip",
    "steps_for_speedup",
    "uniform_schedule",
]

Reuse = Literal["residual", "velocity"]


def steps_for_speedup(num_steps: int, speedup: float) -> int:
    """The number of computed steps of a speed-up: the most that are at least so much faster.

    The one rule of calibration, benchmark and command line.

    Args:
        num_steps: number of sampling steps T.
        speedup: 1 to T / 2, so that at least two steps are computed.

    Example:
        >>> steps_for_speedup(30, 2.0), steps_for_speedup(50, 3.0), steps_for_speedup(30, 2.8)
        (15, 16, 10)
    """
    if not 1 <= speedup <= num_steps / 2:
        raise ValueError(f"speedup must be between 1 and {num_steps / 2:g}, got {speedup:g}")
    return _fewer(num_steps, speedup)


def _fewer(num_steps: int, speedup: float) -> int:
    return math.floor(num_steps / speedup + 1e-9)  # 30 / 2.9999999999 is 10, not 10.0000000003


@dataclass(frozen=True)
class Target:
    """What a run is to reach: at most one of the three.

    Attributes:
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps.
        min_psnr: the fewest computed steps with this PSNR to the full run, in dB.

    Example:
        >>> Target(speedup=3.0).budget(50), Target(speedup=30.0).budget(50), Target().budget(50)
        (16, 2, None)
        >>> Target(speedup=float("nan"))
        Traceback (most recent call last):
        ValueError: speedup must be a finite number of at least 1, got nan
    """

    speedup: float | None = None
    compute_steps: int | None = None
    min_psnr: float | None = None

    def __post_init__(self) -> None:
        """Check that there is at most one target, and its range."""
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one target, not {' and '.join(given)}")
        if self.speedup is not None and not 1 <= self.speedup < math.inf:
            raise ValueError(f"speedup must be a finite number of at least 1, got {self.speedup:g}")
        steps = self.compute_steps
        if steps is not None and not (1 <= steps < math.inf and steps == int(steps)):
            raise ValueError(f"compute_steps must be an integer of at least 1, got {steps}")
        if self.min_psnr is not None and not 0 < self.min_psnr < math.inf:
            raise ValueError(
                f"min_psnr must be a finite number of dB above 0, got {self.min_psnr:g}"
            )

    def budget(self, num_steps: int) -> int | None:
        """The number of computed steps in a run of ``num_steps``; None if the target is another.

        A run of few steps computes two of them, if it has two, where a speed-up would leave less.
        """
        if self.compute_steps is not None:
            return min(self.compute_steps, num_steps)
        if self.speedup is None:
            return None
        return min(num_steps, max(2, _fewer(num_steps, self.speedup)))


def uniform_schedule(num_steps: int, budget: int) -> tuple[int, ...]:
    """``budget`` computed steps, evenly spaced, the first and the last step among them.

    Example:
        >>> uniform_schedule(10, 4)
        (0, 3, 6, 9)
        >>> uniform_schedule(10, 1)
        (0,)
    """
    if not 1 <= budget <= num_steps:
        raise ValueError(f"budget must be between 1 and {num_steps} steps, got {budget}")
    if budget == 1:
        return (0,)
    last, gaps = num_steps - 1, budget - 1
    # Integers: i * last / gaps rounded half up, distinct because last >= gaps.
    return tuple((2 * i * last + gaps) // (2 * gaps) for i in range(budget))


def step_strip(compute_steps: Sequence[int], num_steps: int) -> str:
    """A compute schedule as one character per step: full where it is computed.

    Example:
        >>> step_strip([0, 2], 4)
        '█·█·'
    """
    computed = set(compute_steps)
    return "".join("█" if k in computed else "·" for k in range(num_steps))


def check_compute_steps(compute_steps: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """Return ``compute_steps`` as a tuple; raise a ``ValueError`` if it is not valid.

    Example:
        >>> check_compute_steps([0, 3, 5], 6)
        (0, 3, 5)
    """
    steps = tuple(int(k) for k in compute_steps)
    if not steps or steps[0] != 0:
        raise ValueError("step 0 must be computed: there is nothing to reuse yet")
    if any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"compute_steps must be strictly increasing, got {list(steps)}")
    if steps[-1] >= num_steps:
        raise ValueError(f"compute_steps holds {steps[-1]}, but the run has {num_steps} steps")
    return steps


@dataclass(frozen=True, eq=False)
class TrajectoryPlan:
    """Trajectory rectification: ``x[k+1] = z[k, 0] x[k] + sum_j z[k, j] v[c_j]``, per group.

    Attributes:
        compute_steps: the steps on which the network is evaluated, ascending, the first is 0.
        coefficients: z, shape (T, groups, 1 + H), float64: first that of the latent, the same for
            all groups, then those of the last H computed outputs, newest first; 0 where fewer than
            H outputs exist.
        groups: parts of the latent that have coefficients of their own.
        branch: whether the last H raw outputs of one guidance branch are combined as well; their
            coefficients follow, shape (T, groups, 1 + 2 H).
    """

    compute_steps: tuple[int, ...]
    coefficients: Tensor = field(repr=False)
    groups: Groups = ONE_GROUP
    branch: bool = False

    def __post_init__(self) -> None:
        """Check shapes, types and finiteness."""
        shape, count = tuple(self.coefficients.shape), self.groups.count
        if len(shape) != 3 or shape[0] < 1 or shape[1] != count or shape[2] < 2:
            raise ValueError(f"coefficients must have shape (T, {count}, 1 + H), got {shape}")
        if self.branch and shape[2] % 2 == 0:
            raise ValueError(f"coefficients must have shape (T, {count}, 1 + 2 H), got {shape}")
        check_compute_steps(self.compute_steps, self.num_steps)
        _check_float64("coefficients", self.coefficients)
        latent = self.coefficients[:, :, 0]
        if not torch.equal(latent, latent[:, :1].expand_as(latent)):
            raise ValueError("all groups must have the same coefficient of the latent")

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.coefficients)

    @property
    def history(self) -> int:
        """Number of computed outputs kept, H."""
        return (self.coefficients.shape[2] - 1) // (2 if self.branch else 1)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise if samples of this shape cannot be run; coefficients of groups fit all of them."""


@dataclass(frozen=True, eq=False)
class PaperPlan:
    """The paper's method: reused outputs, an adjusted sigma schedule, a linear rectification.

    Attributes:
        compute_steps: the steps on which the network is evaluated, ascending; first and last
            included.
        reuse: what a reused step returns, ``"residual"`` (eq. 5, 6) or ``"velocity"``.
        sigmas: the sigma schedule of the run, adjusted or not, shape (T + 1,), float64,
            descending.
        gain: K, shape (T, ...) where ``gain[k]`` broadcasts against one sample; None without
            rectification. Rows of computed steps are not used.
        bias: B, like ``gain``.
    """

    compute_steps: tuple[int, ...]
    reuse: Reuse
    sigmas: Tensor = field(repr=False)
    gain: Tensor | None = field(default=None, repr=False)
    bias: Tensor | None = field(default=None, repr=False)

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

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise if the rectification is for samples of another shape."""
        if self.gain is None:
            return
        own = tuple(self.gain.shape[1:])
        sizes = zip(reversed(own), reversed(shape), strict=False)
        if len(own) > len(shape) or any(mine not in (1, size) for mine, size in sizes):
            raise ValueError(
                f"the policy rectifies latents of shape {own}, the run has {shape}: generate at "
                "the calibrated size, or calibrate one number per step"
            )


def _check_float64(name: str, value: Tensor) -> None:
    if value.dtype != torch.float64:
        raise ValueError(f"{name} must be float64, got {value.dtype}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} holds a number that is not finite")
